//! Numbers on the command line.

use locdiff_core::tables::PartShare;

/// Largest number of 32 bits.
pub(super) const U32_MAX: i128 = u32::MAX as i128;
/// Largest number of 64 bits.
pub(super) const U64_MAX: i128 = u64::MAX as i128;

/// A parser of whole numbers from `least` to `most`. Its errors are in plain words.
pub(super) fn number<T: TryFrom<i128>>(
    least: i128,
    most: i128,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text: &str| {
        let number: i128 = text.parse().map_err(|_| "wanted a whole number".to_owned())?;
        let wanted = || match most {
            U32_MAX | U64_MAX if number < least => format!("wanted {least} or above"),
            _ => format!("wanted {least} to {most}"),
        };
        if (least..=most).contains(&number) { T::try_from(number).map_err(|_| wanted()) } else { Err(wanted()) }
    }
}

/// A parser of numbers from `least` to `most`.
pub(super) fn decimal(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |text: &str| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("wanted a number from {least} to {most}"))
    }
}

/// A number of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeCount {
    /// The fewest nodes with which training goes on; `None` if it needs all.
    pub fewest: Option<u32>,
    /// All nodes.
    pub most: u32,
}

/// Parses a number of nodes, such as `4` or `2:4`.
pub(super) fn node_count(text: &str) -> Result<NodeCount, String> {
    let whole = |text: &str| number::<u32>(0, U32_MAX)(text).map_err(|_| "wanted N or MIN:MAX, such as 2:4".to_owned());
    match text.split_once(':') {
        None => Ok(NodeCount { fewest: None, most: whole(text)? }),
        Some((fewest, most)) => {
            let (fewest, most) = (number(1, U32_MAX)(fewest)?, whole(most)?);
            if fewest > most {
                Err("wanted MIN:MAX, such as 2:4".to_owned())
            } else {
                Ok(NodeCount { fewest: Some(fewest), most })
            }
        }
    }
}

/// Parses the name and the share of a part of a table, such as `test=0.05`. The name becomes the name of a file.
pub(super) fn part_share(text: &str) -> Result<PartShare, String> {
    let is_name =
        |name: &str| !name.is_empty() && name.chars().all(|sign| sign.is_alphanumeric() || "-_".contains(sign));
    let (name, share) = text
        .split_once('=')
        .filter(|(name, _)| is_name(name))
        .ok_or_else(|| "wanted NAME=SHARE, such as test=0.05, with letters, digits, - and _ in the name".to_owned())?;
    let share = share.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    let share = share.ok_or_else(|| "wanted a share above 0 and at most 1".to_owned())?;
    Ok(PartShare { name: name.to_owned(), share })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::Cli;

    #[test]
    fn invalid_numbers_are_refused_in_plain_words() {
        for (line, part) in [
            ("x --workers two demo", "invalid value 'two' for '--workers <N>': wanted a whole number"),
            ("x --max-restarts=-1 demo", "'--max-restarts <N>': wanted 0 or above"),
            ("x --nnodes 3:2 train", "'--nnodes <N|MIN:MAX>': wanted MIN:MAX, such as 2:4"),
            ("x --nnodes 0:2 train", "'--nnodes <N|MIN:MAX>': wanted 1 or above"),
            ("x --nnodes two train", "'--nnodes <N|MIN:MAX>': wanted N or MIN:MAX, such as 2:4"),
            ("x --gpus 99999999999 demo", "'--gpus <N>': wanted 0 to 4294967295"),
            ("x shards simulate --out x --views 0", "'--views <V>': wanted 1 to 256"),
            ("x shards simulate --out x --views 1.5", "'--views <V>': wanted a whole number"),
            (
                "x shards simulate --out x --part train --cells nan",
                "'--cells <DEGREES>': wanted a number from 0.01 to 90",
            ),
            ("x shards simulate --out x --rows 0", "'--rows <N>': wanted 1 or above"),
            ("x shards verify x --epochs 1 --world-sizes 1,b", "wanted a whole number"),
            (
                "x shards split x --out y --cell-degrees 0",
                "'--cell-degrees <DEGREES>': wanted a number from 0.001 to 90",
            ),
            ("x shards split x --out y --parts train=0.9,../test=0.1", "invalid value '../test=0.1'"),
            ("x shards split x --out y --parts train=0,test=1", "wanted a share above 0 and at most 1"),
        ] {
            let text = Cli::try_parse_from(line.split(' ')).expect_err("the number is invalid").to_string();
            assert!(text.contains(part), "{line}: {text}");
        }
    }
}
