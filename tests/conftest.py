"""Short runs of train.py that several tests look at."""

import subprocess
import sys

import pytest

import train as train_file

FAST = (
    "--sft_steps 12 --sft_student 6 --sft_anneal 2 --sft_questions 6 --sft_horizon 3 --steps 3 "
    "--tasks_per_step 6 --eval_questions 4 --horizons 1 2 --hidden_size 32 --layers 1 "
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


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Short runs from nothing to a table: one twice, and one of each other variant with the same
    seed. Their folder, and what each printed."""
    folder, out = tmp_path_factory.mktemp("runs"), {}
    for name, extra in VARIANTS.items():
        out[name] = command(*FAST, *extra, "--run_dir", name, cwd=folder)
        assert out[name].returncode == 0, out[name].stderr
    return folder, out
