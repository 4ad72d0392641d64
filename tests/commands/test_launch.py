"""`keras-multigpu launch` starts workers, watches them, and leaves nothing behind.

The scripts use no TensorFlow: these tests are about the launcher alone.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it, lives, start_process, wait_until

from keras_multigpu.cluster import this_machine
from keras_multigpu.commands import main

ROOT = Path(__file__).parents[2]

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
starts = Path(f"starts{index}")

def say(*words):
    print(*words, flush=True)

def started():
    '''How many times this worker started before. Notes its pid and that of a child it starts.'''
    before = len(starts.read_text().splitlines()) if starts.exists() else 0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with starts.open("a") as file:
        file.write(f"{os.getpid()} {child.pid}\\n")
    return before
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(body):
        (tmp_path / "train.py").write_text(WORKER + body)
        return "train.py"

    return write


def process(*words, ignores=(), **more):
    """A running launcher that was started with these signals ignored."""
    return start_process(
        [sys.executable, "-m", "keras_multigpu", "launch", *words],
        ignores,
        env=as_users_start_it(ROOT, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(*words, **more):
    """The exit code of a launcher, the lines of its workers, and its own messages."""
    running = process(*words, **more)
    out, err = running.communicate(timeout=PATIENCE)
    return running.returncode, sorted(out.splitlines()), err


def pids():
    last = [path.read_text().splitlines()[-1] for path in Path().glob("starts*")]
    return [int(word) for line in last for word in line.split()]


def test_each_worker_gets_its_place_arguments_and_gpu(script):
    name = script("say(json.dumps([config, sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES']]))")
    words = "--workers", "2", name, "--epochs", "3"
    code, lines, _ = launched(*words, CUDA_VISIBLE_DEVICES="5,GPU-7")
    assert code == 0
    assert [line[:11] for line in lines] == ["[worker 0] ", "[worker 1] "]
    found = [json.loads(line[11:]) for line in lines]
    workers = found[0][0]["cluster"]["worker"]
    assert [re.fullmatch(r"127\.0\.0\.1:\d+", worker) is None for worker in workers] == [False] * 2
    assert len(set(workers)) == 2
    for index, (config, arguments, gpus) in enumerate(found):
        assert config == {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": index},
        }
        assert (arguments, gpus) == (["--epochs", "3"], ["5", "GPU-7"][index])


def test_the_first_failure_ends_all_workers(script):
    name = script(
        "started()\n"
        "if index: time.sleep(600)\n"
        "while not Path('starts1').exists() or not Path('starts1').read_text(): time.sleep(0.01)\n"
        "for line in range(30): say('line', line)\n"
        "raise SystemExit('no such file')"
    )
    code, _, err = launched("--workers", "2", name)
    assert code == 1
    first, *lines = err.splitlines()
    assert first == "keras-multigpu launch: worker 0 ended with code 1. Its last lines:"
    assert lines == [*(f"    line {line}" for line in range(11, 30)), "    no such file"]
    assert not any(map(lives, pids()))


AGAIN = "worker 0 ended with code 5; starting all again ({} of 2)."


@pytest.mark.parametrize(
    ("words", "body", "code", "said"),
    [
        (["2"], "time.sleep(0.5 * index)", 0, []),
        (
            ["2"],
            "os.kill(os.getpid(), signal.SIGSEGV) if index else time.sleep(600)",
            139,
            ["worker 1 was ended by SIGSEGV. Its last lines:"],
        ),
        (
            ["1", "--max-restarts", "2"],
            "sys.exit(5)",
            5,
            [AGAIN.format(1), AGAIN.format(2), "worker 0 ended with code 5. Its last lines:"],
        ),
    ],
)
def test_the_launcher_ends_with_its_workers(script, words, body, code, said):
    """With the code of the first that fails; it says why."""
    found, _, err = launched("--workers", *words, script(body))
    own = [line for line in err.splitlines() if line.startswith("keras-multigpu launch: ")]
    assert (found, own) == (code, [f"keras-multigpu launch: {line}" for line in said])


IGNORES = """
signal.signal(signal.SIGTERM, lambda *_: say("heard"))
started()
say("ready")
while True: time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_launcher_leaves_no_process_behind(script, number):
    """Even if workers ignore SIGTERM. After `kill -9` a watchdog ends them."""
    running = process("--workers", "2", "--grace", "1", script(IGNORES))
    for _ in range(2):
        assert running.stdout.readline().endswith("ready\n")
    group = pids()
    assert len(group) == 4 and all(map(lives, group))
    running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE)
    wait_until(lambda: not any(map(lives, group)))
    if number == signal.SIGKILL:
        return
    assert running.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[worker 0] heard", "[worker 1] heard"]
    assert err == f"keras-multigpu launch: all workers were ended by {number.name}.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(script, number):
    """As in the background of a script, or under `nohup`. SIGTERM still ends all workers."""
    body = "say('ready')\nwhile not Path('go').exists(): time.sleep(0.01)\nsay('continues')"
    running = process("--workers", "1", script(f"{body}\ntime.sleep(600)"), ignores=[number])
    assert running.stdout.readline() == "[worker 0] ready\n"
    running.send_signal(number)
    Path("go").touch()
    assert running.stdout.readline() == "[worker 0] continues\n"
    running.terminate()
    _, err = running.communicate(timeout=PATIENCE)
    assert err == "keras-multigpu launch: all workers were ended by SIGTERM.\n"
    assert running.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_workers_at_once(script):
    running = process("--workers", "2", "--grace", "600", script(IGNORES))
    for _ in range(2):
        assert running.stdout.readline().endswith("ready\n")
    running.send_signal(signal.SIGINT)
    for _ in range(2):
        assert running.stdout.readline().endswith("heard\n")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert not any(map(lives, pids()))


SAVES = """
def save(*_):
    time.sleep(0.3)
    Path(f"saved{index}").touch()
    say("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
say("ready")
while True: time.sleep(600)
"""


@pytest.mark.parametrize("reader_ends", [False, True])
def test_workers_may_save_before_they_end(script, reader_ends):
    """Even if the same Ctrl-C ends the `tee` of `keras-multigpu launch ... | tee log`."""
    with process("--workers", "2", script(SAVES)) as running:
        for _ in range(2):
            running.stdout.readline()
        running.send_signal(signal.SIGINT)
        if reader_ends:
            running.stdout.close()
        assert running.wait(timeout=PATIENCE) == 130
    assert len(list(Path().glob("saved*"))) == 2


@pytest.mark.parametrize("ignores", [(), (signal.SIGTERM,)])
def test_a_closed_pipe_ends_all_workers(script, ignores):
    """As in `keras-multigpu launch ... | head`, where workers would block forever."""
    name = script("started()\nwhile True: say('x' * 1000)")
    with process("--workers", "2", "--grace", "1", name, ignores=ignores) as running:
        running.stdout.readline()
        wait_until(lambda: len(list(Path().glob("starts*"))) == 2)
        running.stdout.close()
        assert running.wait(timeout=PATIENCE) == 143
    assert not any(map(lives, pids()))


def test_the_others_continue_without_a_worker_that_does_not_start(script):
    """Another worker reports that the second of three hangs. After a failure all start again."""
    name = script(
        "if os.environ['CUDA_VISIBLE_DEVICES'] == '5': time.sleep(600)\n"
        "if len(config['cluster']['worker']) == 3 and index == 0:\n"
        "    say('failures.WorkerFailure: worker 1 (127.0.0.1:2000) is gone.')\n"
        "    sys.exit(7)\n"
        "if index == 1 and not Path('second').exists():\n"
        "    Path('second').touch()\n"
        "    sys.exit(9)\n"
        "time.sleep(1 if len(config['cluster']['worker']) == 2 else 600)\n"
    )
    words = ["--workers", "3", "--min-workers", "2", "--max-restarts", "3", name]
    code, _, err = launched(*words, CUDA_VISIBLE_DEVICES="4,5,6")
    assert code == 0
    without, again, last = err.splitlines()
    going_on = "going on with 2 of 3 workers, without number 1"
    assert without == f"keras-multigpu launch: worker 1 failed first; {going_on} (1 of 3)."
    assert (
        again == "keras-multigpu launch: worker 1 ended with code 9; starting all again (2 of 3)."
    )
    assert last == f"keras-multigpu launch: worker 1 failed first; {going_on} (3 of 3)."


def test_output_of_workers_cannot_control_the_terminal(script):
    name = script(r"sys.stdout.write('1/2\r\x1b[1m2/2\x1b[0m\n\x1b]0;owned\x07\n')")
    _, lines, _ = launched("--workers", "1", name)
    assert lines == [
        r"[worker 0] 2/2",
        r"[worker 0] \x1b]0;owned\x07",
    ]


@pytest.mark.parametrize(
    ("workers", "each", "visible", "expected"),
    [
        (2, None, None, ["0,1", "2,3"]),
        (3, None, None, ["0", "1", "2"]),
        (2, 1, None, ["0", "1"]),
        (2, None, "5,GPU-7", ["5", "GPU-7"]),
        (1, None, "5,-1,7", ["5"]),
    ],
)
def test_workers_share_the_gpus(tmp_path, monkeypatch, workers, each, visible, expected):
    """Of the four that `nvidia-smi -L` lists."""
    lines = "".join(f"echo 'GPU {n}: NVIDIA H100 (UUID: GPU-{n})'\n" for n in range(4))
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 1\n{lines}')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = this_machine.share_out(this_machine.visible_gpus(), workers, each)
    assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]


def test_without_ssh_commands_for_each_host_are_printed(script, capsys):
    name = script("say(json.dumps([config, sys.argv[1:], os.environ.get('CUDA_VISIBLE_DEVICES')]))")
    words = ["--hosts", "a,b", "--workers", "2", "--devices-per-worker", "1", name, "it's"]
    assert main(["launch", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# on a", "# on a", "# on b", "# on b"]
    workers = ["a:23456", "a:23457", "b:23456", "b:23457"]
    for index, line in enumerate(lines[1::2]):
        ended = subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        config, arguments, visible = json.loads(ended.stdout)
        assert config["cluster"] == {"worker": workers}
        assert (config["task"]["index"], arguments, visible) == (index, ["it's"], str(index % 2))


def test_hosts_are_reached_by_ssh(script, tmp_path):
    """A stand-in runs its last argument in a shell, as `ssh` does."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/sh\n[ "$1 $3 $5" = "-tt BatchMode=yes ConnectTimeout=20" ] || exit 255\n'
        'cd / && HOST=$6 exec sh -c "$7"\n'
    )
    ssh.chmod(0o755)
    name = script(
        "say(os.environ['HOST'], config['cluster']['worker'], config['task']['index'])\n"
        "sys.exit(config['cluster']['worker'][0] == 'a:9000')"
    )
    path = f"{ssh.parent}:{os.environ['PATH']}"
    code, lines, _ = launched(
        "--hosts", "a,b", "--ssh", "--port", "9000", "--max-restarts", "1", name, PATH=path
    )
    assert code == 0
    # The first start may end before every worker has printed its line.
    assert "[worker 0] a ['a:9001', 'b:9001'] 0" in lines
    assert "[worker 1] b ['a:9001', 'b:9001'] 1" in lines


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train.py"], "not clear where to start workers"),
        (["--ssh", "--workers", "2", "train.py"], "not clear where to start workers"),
        (["--port", "1", "--workers", "2", "train.py"], "not clear where to start workers"),
        (["--hosts", "a,", "train.py"], "not a list of names"),
        (["--workers", "2", "--min-workers", "1", "train.py"], "`--min-workers` has no effect"),
        (["--hosts", "a", "--workers", "2", "train.py"], "would use the same GPUs"),
        (["--workers", "2", "nosuch.py"], "There is no such script. Expected"),
        (
            ["--workers", "2", "--devices-per-worker", "2", "x.py"],
            "few GPUs .* Expected at least 4",
        ),
        (["--workers", "0", "x.py"], "of at least 1"),
        (["--workers", "x", "x.py"], "of at least 1"),
        (["--grace", "-1", "x.py"], "of at least 0"),
        (["--help"], None),
    ],
)
def test_arguments_that_make_no_sense_are_named(monkeypatch, capsys, words, what):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    try:
        code = main(["launch", *words])
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    if what is None:
        assert code == 0 and "trust anyone who reaches their ports" in " ".join(output.out.split())
    else:
        assert code == 2 and re.search(what, output.err)


def test_a_worker_without_gpus_may_have_parts_of_the_cpu(script):
    name = script("say(os.environ['KERAS_MULTIGPU_CPU_DEVICES'])")
    assert launched("--workers", "1", "--devices-per-worker", "2", name)[1] == ["[worker 0] 2"]


def test_a_port_in_use_is_not_offered():
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        candidates = [used, *this_machine.free_ports(3)]
        found = this_machine.free_ports(2, lambda *_: candidates)
    assert len(found) == 2 and used not in found
