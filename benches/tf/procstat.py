"""Kernel statistics of a set of processes: CPU time, context switches, memory."""

import dataclasses
import os

_TICK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Usage:
    cpu_s: float
    switches: int

    def __sub__(self, other):
        return Usage(self.cpu_s - other.cpu_s, self.switches - other.switches)


def usage(pids):
    """CPU seconds (user + system, all threads, including finished ones) and context switches of the live threads."""
    cpu_s, switches = 0.0, 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            # The command name may contain spaces: count fields from its closing parenthesis.
            fields = file.read().rsplit(")", 1)[1].split()
        cpu_s += (int(fields[11]) + int(fields[12])) / _TICK
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/status") as file:
                    for line in file:
                        if "ctxt_switches:" in line:
                            switches += int(line.split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
    return Usage(cpu_s, switches)


def reset_peak_rss(pids):
    for pid in pids:
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")


def peak_rss(pids):
    """Peak resident set size of each process since `reset_peak_rss`, in bytes."""
    peaks = []
    for pid in pids:
        with open(f"/proc/{pid}/status") as file:
            peaks += [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")]
    return peaks


def machine_busy_s():
    """CPU seconds used on the whole machine (without idle, iowait and steal), and the seconds stolen by the hypervisor."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(x) for x in file.readline().split()[1:9])
    return (user + nice + system + irq + softirq) / _TICK, steal / _TICK
