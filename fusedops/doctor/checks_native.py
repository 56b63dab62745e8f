"""Checks of compiled code, its folder, and the records of tuning."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from .facts import Facts
from .findings import Finding, note, ok, problem
from .remedies import compiler_command

__all__ = ["cache", "compiled", "handler", "records"]


def compiled(facts: Facts) -> Iterator[Finding]:
    """Is there a compiler, and does it make the launcher?"""
    compiler, launcher = facts.stage("native", "compiler"), facts.stage("native", "launcher")
    system = facts.stage("system", "python").get("system", "linux")
    # JAX programs lose their fused products with the compiler, others a little time.
    level = problem if facts.has_gpu and facts.has_engine and "jax" in facts.frameworks_on_gpu else note
    error = facts.error("native", "launcher")
    if not system.startswith("linux"):
        yield note("no-compiler", f"code is compiled on Linux alone, and this is {system}")
    elif compiler and not compiler["program"]:
        is_chosen = "CC" in facts.stage("system", "environment")
        yield level("no-compiler", compiler["why"], "unset CC" if is_chosen else compiler_command(facts))
    elif error:
        yield level("native-failed", error, compiler_command(facts))
    elif launcher:
        yield ok("native-ready", f"compiled by {compiler.get('program')}, loaded from {launcher['path']}")


def handler(facts: Facts) -> Iterator[Finding]:
    """Does the custom call of JAX run?"""
    if not facts.stage("jax", "import") or "jax" not in facts.frameworks_on_gpu or not facts.has_gpu:
        return
    if not facts.stage("native", "compiler").get("program"):
        return  # that is a finding of its own
    error = facts.error("jax", "handler") or facts.error("jax", "registered")
    why = facts.stage("jax", "registered").get("why_not")
    if error:
        yield problem("handler-failed", error, compiler_command(facts))
    elif why and facts.has_engine:
        yield problem("handler-failed", why, facts.install)
    elif not why and facts.stage("jax", "registered"):
        on_gpu = {name: value for name, value in facts.stages("jax").items() if name.startswith("product cuda")}
        unused = [name for name, value in on_gpu.items() if value.get("custom_call") is False]
        if unused:
            yield problem("handler-unused", ", ".join(unused))
        else:
            yield ok("handler-ready", f"loaded from {facts.stage('jax', 'handler').get('path')}")


def cache(facts: Facts) -> Iterator[Finding]:
    """Can compiled code be kept?"""
    found = facts.stage("files", "cache")
    if not found:
        return
    path, elsewhere = shlex.quote(found["path"]), "export FUSEDOPS_CACHE_DIR=$HOME/.fusedops"
    if "mode" not in found or not found["yours"]:
        why = found["why"] or "it belongs to somebody else"
        yield note("cache-unusable", f"{found['path']}: {why}", elsewhere)
    elif not found["used"]:
        yield note("cache-not-private", f"{found['path']} has mode {found['mode']}", f"chmod go-w {path}")
    elif not found["writable"]:
        yield note("cache-read-only", f"{found['path']}: {found['why']}", elsewhere)
    elif facts.stage("native", "launcher").get("kept") is False:
        yield note("cache-not-executable", f"{found['path']}: it may be mounted with noexec", elsewhere)


def records(facts: Facts) -> Iterator[Finding]:
    """Can records of tuning be read and written?"""
    found = facts.stage("files", "records")
    if not found.get("path") or not found["exists"]:
        return
    path = shlex.quote(found["path"])
    if found["why"]:
        yield problem("records-unreadable", f"{found['path']}: {found['why']}", f"mv {path} {path}.broken")
    elif not found["writable"]:
        yield note("records-read-only", found["path"], f"chmod u+w {path}")
