"""Commands, and short runs of train.py that several tests look at."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that no folder has fails at once
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: more threads would only wait
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it on import

import train as train_file  # noqa: E402

FAST = (
    "--sft_steps 12 --sft_student 2 --sft_questions 6 --sft_horizon 3 --steps 3 "
    "--horizon 2 --tasks_per_step 6 --eval_questions 4 --horizons 1 2 --hidden_size 32 --layers 1 "
    "--max_new_tokens 24 --device cpu"
).split()
VARIANTS = {
    "a": [],
    "b": [],
    "history": "--distill history --max_tokens 2000".split(),
    "none": "--distill none --update sliding_window --share q --reward f1".split(),
}


def command(*args, cwd=None, **settings):
    """Run train.py in a separate process."""
    script = [sys.executable, train_file.__file__, *args]
    return subprocess.run(script, capture_output=True, text=True, cwd=cwd, **settings)


def here(module, *args, cwd="."):
    """Run a module's main() in this process: what `command` brings, without the seconds in which a
    process imports torch."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in "12")
    folder, argv, code = os.getcwd(), sys.argv, 0
    try:
        os.chdir(cwd)
        sys.argv = [module.__file__, *map(str, args)]
        with redirect_stdout(out), redirect_stderr(err):
            module.main()
    except SystemExit as stop:
        code = stop.code or 0
        if isinstance(code, str):
            err.write(code)
            code = 1
    finally:
        os.chdir(folder)
        sys.argv = argv
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return SimpleNamespace(returncode=code, stdout=texts[0], stderr=texts[1])


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Short runs from nothing to a table: one twice, and one of each other variant with the same
    seed. Their folder, and what each printed."""
    folder, out = tmp_path_factory.mktemp("runs"), {}
    for name, extra in VARIANTS.items():
        args = [*FAST, *extra, "--run_dir", name]
        out[name] = here(train_file, *args, cwd=folder) if extra else command(*args, cwd=folder)
        assert out[name].returncode == 0, out[name].stderr
    return folder, out
