"""Steps of market environments per second on the device: alone, with acting, and with learning on.

    python tools/market_bench.py --device cuda:0 --json market.json
    python tools/market_bench.py --device cuda:0 --agent c51 --environments 4096 65536 --train-every 8 --precision tf32

One step is one bar in one environment: fills, account, reward, observation, the next episode where one ends. Columns,
in million steps per second over all environments:

    environment     random actions, drawn on the device, and the market
    acting          observations, the agent's network, its policy, and the market
    learning        the whole loop: acting, the market, insertion into the replay, and a step of training after every
                    `--train-every` steps of the environments
    us_per_step     µs from one step of all environments to the next in that loop
    updates_per_s   training steps per second in it

Every launch makes `--chain` steps; times are wall clock over a queue that is kept full, the median of `--samples`. The
bars are a random walk with 48 random features, the branches all four. The goal is 10 million steps per second with
learning on. On the simulated device the tool makes a few steps of few environments, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import numpy as np

from fxengine import Device, DeviceNotFound, Engine
from fxengine.data import Bars, next_bar_labels
from fxengine.graphs import CONSTANTS, Plan
from fxengine.ops import market
from fxengine.ops import policy as policies
from fxengine.rl.agents import Agent
from fxengine.rl.collector import Collector, market_replay, training_step
from fxengine.rl.market import MarketData, MarketSpec, typical_range
from fxengine.rl.trading import AGENTS, make_agent
from fxengine.rl.transition import (
    LEARNT,
    MARKET_STREAM,
    POLICY_STREAM,
    append_end,
    append_transition,
    loop_builder,
    reset_plan,
)
from tools.bench_step import PRECISIONS, SIMULATED
from tools.digest import origin, source_digest

ENVIRONMENTS = {"cuda": (1, 64, 4096, 65536), "sim": (1, 64)}
#: Million steps per second with learning on.
GOAL = 10.0

_BARS, _FEATURES, _REGIMES = 8192, 48, 4
# Most transitions that the replay keeps, and most steps.
_CAPACITY, _SLOTS = 2**22, 1024


def random_bars() -> MarketData:
    """A random walk of hourly bars with random features."""
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0.0, 1e-3, _BARS)))
    opened = np.append(close[:1], close[:-1])
    high = np.maximum(opened, close) * np.exp(rng.exponential(5e-4, _BARS))
    low = np.minimum(opened, close) * np.exp(-rng.exponential(5e-4, _BARS))
    hours = np.datetime64("2020-01-01T00", "ns") + np.arange(_BARS) * np.timedelta64(1, "h")
    bars = Bars.from_arrays(hours, opened, high, low, close, source="random walk")
    features = rng.normal(size=(_BARS, _FEATURES)).astype(np.float32)
    regime = (np.arange(_BARS) % _REGIMES).astype(np.int32)
    return MarketData(bars, features, next_bar_labels(close, 1), regime, 1, typical_range(bars))


def rate(run: Callable[[int], None], wait: Callable[[], None], steps: int, samples: int) -> float:
    """Seconds per step: the median over samples of so many steps, after a warm-up of as many."""
    times = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        run(steps)
        wait()
        times.append((time.perf_counter() - start) / steps)
    return median(times[1:])


def random_actions(engine: Engine, environments: market.Environments, builder: Any) -> None:
    """Append: uniformly drawn actions, and a step."""
    program, (count, width) = builder.program, environments.observation_shape
    branches = environments.spec.branches
    zeros = np.zeros((count, sum(branches)), np.float32)
    one = program.tensor("one", (1,), arena=CONSTANTS, data=np.ones(1, np.float32))
    actions = program.tensor("actions", (count, len(branches)), np.int32)
    policies.policy(
        program,
        program.tensor("q", zeros.shape, arena=CONSTANTS, data=zeros),
        actions,
        branches=branches,
        kind="epsilon_greedy",
        scalar=one,
        counters=builder.counters,
        stream=POLICY_STREAM,
    )
    market.step(
        program,
        environments,
        actions=actions,
        next_state=program.tensor("next_state", (count, width)),
        reward=program.tensor("reward", (count,)),
        done=program.tensor("done", (count,), np.int32),
        signal=builder.signal,
        counters=builder.counters,
        stream=MARKET_STREAM,
    )


def bench_without_learning(
    engine: Engine, agent: Agent | None, data: MarketData, spec: MarketSpec, count: int, options: argparse.Namespace
) -> float:
    """Seconds per step of all environments, of an agent or with random actions."""
    builder = loop_builder(engine)
    environments = market.declare(builder.program, data, spec, count)
    if agent is None:
        random_actions(engine, environments, builder)
    else:
        append_transition(builder, environments, agent, "epsilon_greedy")
    append_end(builder)
    with (
        Plan(builder.program, engine.device, base=engine.plan, share=LEARNT) as plan,
        reset_plan(engine, plan, environments, stagger=True) as start,
        plan.capture_nodes(range(len(plan.nodes)), stream=engine.stream, chain=options.chain) as graph,
    ):
        plan.buffer("signals").fill_u32(0)
        plan.buffer("collector.counters").fill_u32(0)
        start.run(stream=engine.stream)

        def run(steps: int) -> None:
            for _ in range(steps // options.chain):
                graph.launch(stream=engine.stream)

        return rate(run, engine.synchronize, options.steps, options.samples)


def bench(device: Device, data: MarketData, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    spec = MarketSpec()
    state = spec.observation_size(_FEATURES)
    agent = make_agent(options.agent, state, options.batch, _REGIMES, device.kind)
    slots = max(options.chain, min(_SLOTS, _CAPACITY // count))
    with Engine(
        training_step(agent),
        device=device,
        groups=agent.groups,
        replay=market_replay(agent, environments=count, slots=slots),
        precision=options.precision,
        signals={"market_spread": 1e-4},
    ) as engine:
        alone = bench_without_learning(engine, None, data, spec, count, options)
        acting = bench_without_learning(engine, agent, data, spec, count, options)
        with Collector(engine, agent, data, spec, train_every=options.train_every) as collector:

            def run(steps: int) -> None:
                collector.run(steps, chain=options.chain)

            learning = rate(run, engine.synchronize, options.steps, options.samples)
    return {
        "environments": count,
        "environment": round(count / alone / 1e6, 4),
        "acting": round(count / acting / 1e6, 4),
        "learning": round(count / learning / 1e6, 4),
        "us_per_step": round(learning * 1e6, 2),
        "updates_per_s": round(1.0 / learning / options.train_every, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    return "\n".join(
        ["".join(f"{name:>15}" for name in rows[0])]
        + ["".join(f"{value:>15}" for value in row.values()) for row in rows]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Steps of market environments per second on the device.")
    parser.add_argument("--agent", choices=AGENTS, default="dqn", help="default: %(default)s")
    parser.add_argument("--environments", nargs="+", type=int, help="default: 1 64 4096 65536; simulated: 1 64")
    parser.add_argument("--batch", type=int, default=256, help="transitions of a training step (default: %(default)s)")
    parser.add_argument("--train-every", type=int, default=1, help="steps of the environments (default: %(default)s)")
    parser.add_argument("--chain", type=int, help="steps of a launch (default: 16; 2 on the simulated device)")
    parser.add_argument("--steps", type=int, help="steps of a sample, chains of them (default: 1600; simulated: 4)")
    parser.add_argument("--samples", type=int, help="default: 5; 1 on the simulated device")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args(argv)
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with device:
        simulated = device.kind == "sim"
        options.chain = options.chain or (2 if simulated else 16)
        options.steps = options.steps or (4 if simulated else 1600)
        options.samples = options.samples or (1 if simulated else 5)
        if options.steps % options.chain:
            parser.error(f"--steps {options.steps} is no multiple of --chain {options.chain}")
        data = random_bars()
        rows = [bench(device, data, n, options) for n in options.environments or ENVIRONMENTS[device.kind]]
        source = {"digest": source_digest(), **origin(device), "note": SIMULATED if simulated else None}
    best = max(row["learning"] for row in rows)
    asked = {name: getattr(options, name) for name in ("agent", "batch", "train_every", "chain", "steps", "precision")}
    print(f"{source['device']['name']} ({source['device']['arch']}), {asked}, million steps per second")
    print(table(rows))
    if source["note"]:
        print(f"note: {source['note']}")
    else:
        verdict = "met" if best >= GOAL else "NOT met"
        print(f"with learning on: {best:.2f} million steps per second, goal {GOAL:g}: {verdict}")
    if options.json:
        options.json.write_text(json.dumps({**source, "options": asked, "market": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
