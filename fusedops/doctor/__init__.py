"""``python -m fusedops doctor``: what is installed, what works, and the command that mends what does not.

Probes find facts (``probes.py`` is their list), checks make findings of them (``checks.py``), and ``text.py`` shows
both. A probe imports, loads or launches things that may be broken in any way, so each runs in a process of its own
with a time limit, and what becomes of that process is a fact like any other. The checks are pure: facts in, findings
out, so that every finding has a test that needs no such machine.
"""

from .command import main

__all__ = ["main"]
