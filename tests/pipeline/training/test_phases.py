"""The phases of a train step are seen from outside: in the program, as events, and in a log."""

from __future__ import annotations

from torch.optim import SGD

from pipeline.events import Event, PhaseEnded, Progress, RunLog
from pipeline.training import PHASES, record_step
from tests.pipeline.training.steps import LOSS, MODELS, seeded


def test_each_phase_is_in_the_program_and_among_the_events() -> None:
    events: list[Event] = []
    module, batch = seeded(MODELS["mlp"].make), MODELS["mlp"].batch(0)
    program = record_step(module, LOSS, SGD(module.parameters(), lr=0.1), batch, observe=events.append)
    begun = [event.part for event in events if isinstance(event, Progress)]
    ended = [event.name for event in events if isinstance(event, PhaseEnded)]
    assert begun == list(PHASES) == ["Trace", "Compile", "Warmup", "Capture", "Replay"]
    assert ended == ["Trace", "Compile", "Warmup", "Capture"]
    assert [phase.name for phase in program.phases] == begun
    assert all(phase.seconds > 0 for phase in program.phases[:-1])
    assert (program.phases[-1].seconds, program.phases[-1].detail) == (0.0, "0 steps")
    program.step(batch)
    assert program.phases[-1].seconds > 0
    assert program.phases[-1].detail == "1 step"


def test_a_log_has_a_line_for_each_phase() -> None:
    log = RunLog()
    module = seeded(MODELS["mlp"].make)
    record_step(module, LOSS, SGD(module.parameters(), lr=0.1), MODELS["mlp"].batch(0), observe=log.add)
    lines = [line[11:] for line in log.text().splitlines()]
    assert [line.split(":")[0] for line in lines if line.startswith("phase ")] == [
        f"phase {name}" for name in PHASES[:4]
    ]
    assert any(line.startswith("phase Warmup: ") and line.endswith("(8 states as before)") for line in lines)
