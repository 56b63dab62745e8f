"""Commands that mend things, which several checks give."""

from __future__ import annotations

from .facts import Facts

__all__ = ["REPORT", "compiler_command", "torch_command"]

REPORT = "python -m fusedops doctor --json > doctor.json"
"""What to send along with a report."""

_TORCH_INDEX = {12: "cu126", 13: "cu130"}


def torch_command(major: int) -> str:
    """Return the command that installs PyTorch for a major version of CUDA."""
    index = f"https://download.pytorch.org/whl/{_TORCH_INDEX[major]}"
    return f"pip install --force-reinstall 'torch>=2.9,<2.14' --index-url {index}"


def compiler_command(facts: Facts) -> str:
    """Return the command that installs a C compiler where Python came from."""
    is_conda = facts.stage("system", "python").get("conda")
    return "conda install -c conda-forge gxx" if is_conda else "apt-get install gcc libc6-dev"
