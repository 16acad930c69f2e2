"""The memory of a machine and of a container, from the files of the kernel."""

from pathlib import Path

from tk.core.machine_memory import free_memory, machine_memory


def test_a_container_has_the_rest_of_its_limit_and_the_cache_of_files(tmp_path: Path) -> None:
    unlimited = free_memory(tmp_path)
    stat = "anon 500\ninactive_file 300\nactive_file 100\nshmem 50\n"
    for name, text in (("max", "1000\n"), ("current", "900\n"), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > 0.5 * unlimited > 500


def test_a_machine_has_its_memory_and_swap_or_the_limit_of_its_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:     1000 kB\nMemFree:       10 kB\nSwapTotal:     500 kB\n")
    assert machine_memory(tmp_path, meminfo) == 1500 * 1024
    limit = tmp_path / "memory.max"
    for text, expected in (("max\n", 1500 * 1024), ("4096\n", 4096), (f"{10**9}\n", 1500 * 1024)):
        limit.write_text(text)
        assert machine_memory(tmp_path, meminfo) == expected
    assert machine_memory() > free_memory() > 0
