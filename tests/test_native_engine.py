"""The engine's ways to launch over the stand-in: planning, the launcher's copy of a descriptor, the choice of a way."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from test_column_form import Call, Placed, simple

import fusedops
from fusedops import Epilog
from fusedops.engines.base import LAUNCHER
from fusedops.native import build

pytest.importorskip("nvmath", reason="the engine's binding is nvmath-python's")
pytest.importorskip("cupy", reason="planning carries CuPy arrays")

from native.fake_binding import FakeBinding, install
from native.stand_in import stand_in, stand_in_launcher

from fusedops.engines.nvmath import launches, native_program, planning

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native code is compiled on Linux alone")

WAYS = {"native": launches.native_way, "binding": launches.binding_way}
SHAPES: dict[str, Any] = {
    "plain": {"batch": (), "m": 17, "n": 12, "k": 9},
    "batch": {"batch": (3,), "m": 5, "n": 12, "k": 9, "b_batch": (3,)},
    "columns": {"batch": (), "m": 33, "n": 16, "k": 9, "flag_a": True},
    "with c": {"batch": (2,), "m": 5, "n": 12, "k": 9, "c": (5, 12)},
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBinding:
    """The engine over the stand-in, with a native launcher."""
    return install(monkeypatch, native=True)


def addresses(call: Call) -> tuple[int, ...]:
    """Return where a, b, c, out, bias or sum, and the residual lie."""

    def address(name: str) -> int:
        placed: Placed | None = call.arrays.get(name)
        return 0 if placed is None else placed.memory.data.ctypes.data

    gives = call.problem.epilog.gives
    sums = gives is not None and gives.format.startswith("sum")
    aux = address("aux_in") or (0 if sums else address("aux_out"))
    bias = address("aux_out") if sums else address("bias")
    return address("a"), address("b"), address("c") or address("out"), address("out"), bias, aux


def written(call: Call, program: Any) -> list[bytes]:
    """Launch a program over zeroed results, and return the bytes of all that it writes."""
    results = [call.arrays[name].memory.data for name in ("out", "aux_out") if name in call.arrays]
    for result in results:
        result[...] = 0
    program.launch(*addresses(call), 0, 2.0, 0.5 if "c" in call.arrays else 0.0, 0)
    return [result.tobytes() for result in results]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("epilog", Epilog, ids=lambda epilog: epilog.name)
def test_native_and_binding_give_the_same_bits(fake: FakeBinding, epilog: Epilog, shape: dict[str, Any]) -> None:
    """The launcher's copy of a descriptor says what the planned one says, its layouts what the binding's say."""
    call = simple(epilog, **shape)
    native, binding = (written(call, planning.plan_program(call.problem, 16, way)) for way in WAYS.values())
    assert native == binding
    assert any(any(part) for part in native)


def test_a_family_shares_one_copy_and_a_native_program_has_its_own(fake: FakeBinding) -> None:
    """The pointers of an XLA program are nobody else's."""
    before = stand_in().count("live_descriptors")
    problems = [simple(Epilog.BIAS, (), m, 12, 9).problem for m in (3, 4, 5)]
    programs = [planning.plan_program(problem, 16) for problem in problems]
    assert stand_in().count("live_descriptors") == before + 2  # the planned one and the launcher's
    own = [native_program(problem, 16, stand_in_launcher()) for problem in problems[:2]]
    assert stand_in().count("live_descriptors") == before + 4
    assert len({program.address for program in own}) == 2
    del programs, own
    assert stand_in().count("live_descriptors") == before + 2


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_new_m_of_a_bucket_costs_a_check_and_no_heuristic(fake: FakeBinding, way: launches.Way) -> None:
    """And an algorithm that the check refuses is asked for anew."""
    planning.plan_program(simple(Epilog.RELU, (), 33, 12, 9).problem, 16, way)
    heuristics, checks = fake.heuristics, stand_in().count("checks")
    planning.plan_program(simple(Epilog.RELU, (), 34, 12, 9).problem, 16, way)
    assert (fake.heuristics, stand_in().count("checks")) == (heuristics, checks + 1)
    stand_in().set("fail_check", 15)
    planning.plan_program(simple(Epilog.RELU, (), 35, 12, 9).problem, 16, way)
    stand_in().reset()
    assert fake.heuristics == heuristics + 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_known_bad_algorithm_is_passed_over(fake: FakeBinding, way: launches.Way) -> None:
    """The next one is taken, with the workspace that it asks for, and 16 bytes where there is an epilog."""
    fake.proposed = [(66, 0, 2), (21, 512, 1)]
    for epilog, workspace in ((Epilog.DEFAULT, 512), (Epilog.RELU, 528)):
        program = planning.plan_program(simple(epilog, (), 1, 8, 11528).problem, 16, way)
        assert (program.algorithm_id, program.split_k, program.workspace) == (21, 1, workspace)
        assert [each.algorithm_id for each in planning.sound_programs(simple(epilog, (), 1, 8, 11528).problem, 16)] == (
            [21, 21]
        )


def test_no_algorithm_is_an_error_that_names_the_problem(fake: FakeBinding) -> None:
    """Whoever asks."""
    fake.proposed = []
    problem = simple(Epilog.RELU, (), 17, 12, 9).problem
    for ask in (lambda: planning.plan_program(problem, 16), lambda: native_program(problem, 16, stand_in_launcher())):
        with pytest.raises(RuntimeError, match="no algorithm for RELU on m=17 n=12 k=9 float64"):
            ask()


def test_without_a_launcher_the_binding_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and said."""
    install(monkeypatch, native=False)
    way, said = launches.fastest_way()
    assert (way, said) == (launches.binding_way, "binding: no C compiler")
    call = simple(Epilog.RELU_BIAS, (), 17, 12, 9)
    assert isinstance(planning.plan_program(call.problem, 16).launch, launches.BindingLaunch)


# What `support` says --------------------------------------------------------------------------------------------------


def test_support_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first launch what there is, after it what is used."""
    monkeypatch.delitem(LAUNCHER, "nvmath", raising=False)
    assert fusedops.support().launcher == "native"
    monkeypatch.setitem(LAUNCHER, "nvmath", "binding: of late")
    assert "launcher: binding: of late" in str(fusedops.support()).splitlines()


def test_support_says_why_there_is_no_native_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to do."""
    monkeypatch.delitem(LAUNCHER, "nvmath", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("CC", "no-such-cc")
    from fusedops.native import launcher

    launcher.launcher_object.cache_clear()
    said = fusedops.support().launcher
    launcher.launcher_object.cache_clear()
    assert said.startswith("binding: $CC is 'no-such-cc', which is not on the PATH. Install a C compiler")


@pytest.mark.parametrize("name", ["matmul", "matmul_desc_set_attribute", "MatmulDescAttribute"])
def test_an_nvmath_of_other_names_is_used_by_its_public_ones(name: str) -> None:
    """The engine loads, says how it launches, and has no native program to give."""
    code = f"""
from nvmath.bindings import cublasLt
import nvmath.linalg.advanced
delattr(cublasLt, {name!r})
import fusedops
from fusedops.engines import nvmath
from fusedops.native.launcher import NoNativeCode
assert nvmath.choice.execute.plan_program
try:
    nvmath.native_program(None, 16, None)
except NoNativeCode as error:
    print(error)
print(fusedops.support().launcher)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("Matmul.execute: this nvmath lacks what the launcher reads")
    assert name in first
