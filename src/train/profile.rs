//! `bench train --profile` and `bench sample --profile`: where the time of a step goes. On the CPU, the table lists
//! libtorch's operators, each without the time of the operators that it called. On a GPU, it lists kernels, copies and
//! fills.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use locdiff_core::protocol::ProfileRow;
use tch::Device;

use crate::native::NativeError;
use crate::native::profiler::{ProfiledCall, ProfiledDevice, profile};

/// Runs `work`, which takes `steps` steps and waits for the device, under the profiler. The returned rows are
/// sorted by time. If the profiler saw nothing, there are no rows.
pub(crate) fn profile_steps<E: From<NativeError>>(
    device: Device,
    steps: u64,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<Vec<ProfileRow>, E> {
    let device = if device.is_cuda() { ProfiledDevice::Gpu } else { ProfiledDevice::Cpu };
    let (result, calls) = profile(device, work)?;
    result?;
    Ok(rows(&calls, device, steps))
}

/// One row for each name.
fn rows(calls: &[ProfiledCall], device: ProfiledDevice, steps: u64) -> Vec<ProfileRow> {
    let times_ns = match device {
        ProfiledDevice::Cpu => own_times_ns(calls),
        ProfiledDevice::Gpu => calls.iter().map(|call| call.duration_ns).collect(),
    };
    let total_ns = times_ns.iter().sum::<u64>().max(1) as f64;
    let began_ns = calls.iter().map(|call| call.start_ns).min().unwrap_or(0);
    let mut sums: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for (call, time_ns) in calls.iter().zip(times_ns) {
        let (count, sum_ns, first_ns) = sums.entry(&call.name).or_insert((0, 0, u64::MAX));
        (*count, *sum_ns) = (*count + 1, *sum_ns + time_ns);
        *first_ns = call.start_ns.min(*first_ns);
    }
    let mut rows: Vec<ProfileRow> = sums
        .into_iter()
        .map(|(name, (count, sum_ns, first_ns))| ProfileRow {
            name: name.to_owned(),
            calls: count as f64 / steps as f64,
            ms_per_step: sum_ns as f64 / 1e6 / steps as f64,
            percent: 100.0 * sum_ns as f64 / total_ns,
            first_ms: (first_ns - began_ns) as f64 / 1e6,
        })
        .collect();
    rows.sort_by(|a, b| b.ms_per_step.total_cmp(&a.ms_per_step));
    rows
}

/// For each call, its duration minus the durations of the calls that began and ended within it on the same thread.
fn own_times_ns(calls: &[ProfiledCall]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..calls.len()).collect();
    // A call comes before the calls within it.
    order.sort_by_key(|index| (calls[*index].thread, calls[*index].start_ns, Reverse(calls[*index].duration_ns)));
    let mut own_ns: Vec<u64> = calls.iter().map(|call| call.duration_ns).collect();
    let mut open: Vec<usize> = Vec::new();
    for index in order {
        let call = &calls[index];
        let contains =
            |outer: &ProfiledCall| outer.thread == call.thread && call.start_ns < outer.start_ns + outer.duration_ns;
        while open.last().is_some_and(|outer| !contains(&calls[*outer])) {
            open.pop();
        }
        if let Some(outer) = open.last() {
            own_ns[*outer] = own_ns[*outer].saturating_sub(call.duration_ns);
        }
        open.push(index);
    }
    own_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, thread: u64, start_ns: u64, duration_ns: u64) -> ProfiledCall {
        ProfiledCall { name: name.to_owned(), thread, start_ns, duration_ns }
    }

    #[test]
    fn time_of_an_operator_excludes_the_operators_that_it_called() {
        let calls = [
            call("inner", 1, 10, 30),
            call("outer", 1, 10, 100),
            call("innermost", 1, 12, 5),
            call("inner", 1, 60, 50),
            call("next", 1, 110, 7),
            call("other thread", 2, 20, 40),
        ];
        assert_eq!(own_times_ns(&calls), [25, 20, 5, 50, 7, 40]);
        let rows = rows(&calls, ProfiledDevice::Cpu, 5);
        assert_eq!((rows[0].name.as_str(), rows[0].calls, rows[0].first_ms), ("inner", 0.4, 0.0));
        assert!(rows.iter().any(|row| row.name == "next" && row.first_ms == 1e-4), "{rows:?}");
        assert!((rows[0].percent - 100.0 * 75.0 / 147.0).abs() < 1e-9, "{rows:?}");
        assert!((rows.iter().map(|row| row.percent).sum::<f64>() - 100.0).abs() < 1e-9, "{rows:?}");
    }
}
