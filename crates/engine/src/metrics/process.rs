//! Facts about the process, under the names that Prometheus' client libraries use.

use std::fmt::Write;
use std::fs;

/// The kernel shows times in units of 10 ms on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// What cannot be read is left out.
pub fn render() -> String {
    let mut out = String::new();
    let mut line = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
    };
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field, a name in parentheses, may contain anything.
    let fields: Vec<u64> = stat
        .rsplit_once(") ")
        .map_or("", |(_, rest)| rest)
        .split(' ')
        .map(|field| field.trim().parse().unwrap_or(0))
        .collect();
    // Numbered as in proc(5), from 3.
    let field = |number: usize| fields.get(number - 3).map(|value| *value as f64);
    let processor = field(14).zip(field(15)).map(|(user, system)| (user + system) / TICKS_PER_SECOND);
    line("process_cpu_seconds_total", "counter", "Processor time of the process.", processor);
    let begun = fs::read_to_string("/proc/stat").ok().and_then(|text| number_after(&text, "btime "));
    let started = begun.zip(field(22)).map(|(boot, ticks)| boot + ticks / TICKS_PER_SECOND);
    line("process_start_time_seconds", "gauge", "When the process started, in Unix time.", started);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let memory = |name: &str| number_after(&status, name).map(|kilobytes| kilobytes * 1024.0);
    line("process_virtual_memory_bytes", "gauge", "Virtual memory of the process.", memory("VmSize:"));
    line("process_resident_memory_bytes", "gauge", "Resident memory of the process.", memory("VmRSS:"));
    line("process_threads", "gauge", "Threads of the process.", number_after(&status, "Threads:"));
    // One of them is the folder being read.
    let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count().saturating_sub(1) as f64);
    line("process_open_fds", "gauge", "Open file descriptors.", open);
    let most = fs::read_to_string("/proc/self/limits").ok().and_then(|text| number_after(&text, "Max open files"));
    line("process_max_fds", "gauge", "The limit of open file descriptors.", most);
    out
}

/// The number behind a text.
fn number_after(text: &str, before: &str) -> Option<f64> {
    text.split_once(before)?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_this_process() {
        let held: Vec<fs::File> = (0..5).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        let text = render();
        let value =
            |name: &str| number_after(&text, &format!("\n{name} ")).unwrap_or_else(|| panic!("no {name}: {text}"));
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let resident = number_after(&status, "VmRSS:").unwrap() * 1024.0;
        assert!((value("process_resident_memory_bytes") / resident - 1.0).abs() < 0.5, "{text}");
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_open_fds") >= held.len() as f64 && value("process_open_fds") < value("process_max_fds"));
        assert!(value("process_threads") >= 1.0 && value("process_cpu_seconds_total") >= 0.0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-2.0..3600.0).contains(&age), "{age} s");
    }
}
