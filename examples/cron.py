"""A report that is due again and again, and a sync that takes longer than its period: schedules that no restart forgets.

    python examples/cron.py                              a report every half a second, for three seconds
    python examples/cron.py --seconds 3600               longer; stop it and start it as you like
    python examples/cron.py --cron "0 9 * * 1-5" --timezone Europe/Berlin --seconds 1e9

1. The schedules are kept in the data directory. The program asks for them at each start, which changes nothing while it asks
   for the same.
2. Each occurrence is one workflow, with an id that follows from its time, so that it runs once however often the process
   dies. What the run is for is in that id, and not in the clock at which the run happens to get to work.
3. The report may be late, and is written once for all that was missed. The sync may not overlap itself, and what is due
   while it works waits for it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trio

from perdure.actors import ScheduleInfo, open_supervisor
from perdure.workflow import Context, workflow


def collect(topic: str) -> int:
    """Stand for a slow query."""
    return len(topic)


def publish(text: str) -> None:
    """Stand for an e-mail."""
    print(text, flush=True)


@workflow
async def report(ctx: Context, topic: str) -> str:
    """Write the report that was due at the time that the workflow's id says."""
    due = ctx.workflow_id.partition("@")[2]
    sold = await ctx.step("collect", collect, topic)
    text = f"report on {topic}, due at {due}: {sold} sold"
    await ctx.step("publish", publish, text)
    return due


@workflow
async def sync(ctx: Context, seconds: float) -> None:
    """Work for longer than the schedule's period."""
    await ctx.sleep("work", seconds)
    await ctx.step("say", publish, f"synced for {ctx.workflow_id}")


async def run(data: Path, seconds: float, cron: str | None, timezone: str) -> tuple[ScheduleInfo, ...]:
    """Let the schedules run for some seconds; gives what is known of them then."""
    async with open_supervisor(data, workflows=[report, sync]) as supervisor:
        if cron is None:
            await supervisor.schedule("sales-report", report, "sales", every=0.5, misfire="once")
        else:
            await supervisor.schedule("sales-report", report, "sales", cron=cron, timezone=timezone, misfire="once")
        await supervisor.schedule("sync", sync, 0.6, every=0.5, overlap="queue")
        for known in await supervisor.schedules():
            print(f"{known.name}: {known.spec}, next at {known.next_at}", flush=True)
        await trio.sleep(seconds)
        return await supervisor.schedules()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Workflows that are due again and again.")
    parser.add_argument("--data", type=Path, default=Path("cron-data"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--cron")
    parser.add_argument("--timezone", default="UTC")
    arguments = parser.parse_args()
    for known in trio.run(run, arguments.data, arguments.seconds, arguments.cron, arguments.timezone):
        print(f"{known.name}: last at {known.last_at}, {len(known.active)} at work, {known.queued} queued")


if __name__ == "__main__":
    main()
