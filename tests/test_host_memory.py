"""How much memory is available on a machine, in a container, in a control group."""

from keras_multigpu.host_memory import available_bytes


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_control_groups_the_machine_limits_memory(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:    300 kB\n")
    assert available_bytes(tmp_path) == 300 * 1024


def test_the_tightest_control_group_limits_memory(tmp_path):
    """Version 2: a parent group sets the limit, and cached files can be freed."""
    write(tmp_path, "proc/meminfo", "MemAvailable: 300 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    for group, limit in (("job", "5000"), ("job/step", "max")):
        write(tmp_path, f"sys/fs/cgroup/{group}/memory.max", limit)
        write(tmp_path, f"sys/fs/cgroup/{group}/memory.current", "4000")
        write(tmp_path, f"sys/fs/cgroup/{group}/memory.stat", "inactive_file 70\nactive_file 9\n")
    assert available_bytes(tmp_path) == 5000 - 4000 + 79


def test_a_control_group_of_version_1_limits_memory(tmp_path):
    """A container sees the host's path, but finds its limits at the top of the tree."""
    write(tmp_path, "proc/meminfo", "MemAvailable: 300 kB\n")
    write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/\n4:memory:/docker/12\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "5000")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "4000")
    write(tmp_path, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 70\n")
    assert available_bytes(tmp_path) == 5000 - 4000 + 70
