//! Numbers on the command line.

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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::Cli;

    #[test]
    fn invalid_numbers_are_refused_in_plain_words() {
        for (line, part) in [
            ("x --workers two demo", "invalid value 'two' for '--workers <N>': wanted a whole number"),
            ("x --max-restarts=-1 demo", "'--max-restarts <N>': wanted 0 or above"),
            ("x --gpus 99999999999 demo", "'--gpus <N>': wanted 0 to 4294967295"),
            ("x shards simulate --out x --views 0", "'--views <V>': wanted 1 to 256"),
            ("x shards simulate --out x --views 1.5", "'--views <V>': wanted a whole number"),
            ("x shards simulate --out x --rows 0", "'--rows <N>': wanted 1 or above"),
            ("x shards verify x --epochs 1 --world-sizes 1,b", "wanted a whole number"),
        ] {
            let text = Cli::try_parse_from(line.split(' ')).expect_err("the number is invalid").to_string();
            assert!(text.contains(part), "{line}: {text}");
        }
    }
}
