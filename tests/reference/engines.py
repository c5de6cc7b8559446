"""Two engines that run the same workflow on the same bytes: this one, and the reference engine in a node process.

1. What both take and give is a `Position`: all pairs of the namespace, the armed alarm, the messages that nobody has read, the
   time, and the effects so far. A run goes from one position to the next.
2. The reference engine keeps no messages in a namespace, its host does. So a position holds them apart; for a run of ours
   they are put into the mailbox, and what is left of them is taken out again, mailbox keys included. Whoever moves a workflow
   from one engine's host to the other's must do the same.
3. The node process is asked one thing at a time and remembers nothing (driver.mjs). It runs copies of the .mjs files, since
   node looks for packages beside the file that imports them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dumps import Dump
from harness import Host, MovableClock, Namespace
from vectors import Workflow, effects

from perdure.storage import Batch, decode_value, encode_value, layout
from perdure.storage.schema import MailboxMessage, decode_message, encode_message
from perdure.workflow import RunMode, WorkflowFailedError, replay_from_step

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "build" / "reference"
"""Where `make reference` installs the reference engine."""

WORKFLOW_ID = "workflow-1"
START_MS = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class Mail:
    """A message that waits; its body is CBOR."""

    id: str
    name: str
    body: bytes
    sent_at_ms: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a workflow stands between two runs.

    Attributes:
        kv: All pairs but those of our mailbox.
        alarm_ms: The armed alarm.
        mail: What was sent and not read, oldest first.
        now_ms: The time.
        effects: What the steps did so far.
        state: The state that the last run told; "threw" if it raised.
        result: What the last run returned, or the name of what it raised.
        writes: The positions in which the last run would have left the workflow had its process died: after each write.
    """

    kv: Dump
    alarm_ms: int | None = None
    mail: tuple[Mail, ...] = ()
    now_ms: int = START_MS
    effects: tuple[str, ...] = ()
    state: str = "pending"
    result: Any = None
    writes: tuple[Position, ...] = ()

    @property
    def stored_state(self) -> str:
        """The state that is stored."""
        return self.kv.get(layout.STATE_KEY, b"pending").decode()


class ReferenceEngine:
    """The reference engine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, position: Position, name: str, input: object, action: str = "run", *, is_hasty: bool = False
    ) -> Position:
        """Run the workflow of that name in yield mode.

        With "recover" a failed one is made runnable first; with the id of a step's entry it is replayed from there.
        `is_hasty`: Its writes take no time.
        """
        answer = self._ask(
            workflow=name,
            input=None if input is None else encode_value(input).hex(),
            kv=[(key.hex(), value.hex()) for key, value in sorted(position.kv.items())],
            alarm=position.alarm_ms,
            mail=[
                {"id": mail.id, "name": mail.name, "body": mail.body.hex(), "sentAt": mail.sent_at_ms}
                for mail in position.mail
            ],
            now=position.now_ms,
            effects=position.effects,
            action=action,
            isHasty=is_hasty,
        )
        threw = answer.get("threw")
        output = answer.get("output")
        return replace(
            _stored(position, answer),
            state="threw" if threw else answer["state"],
            result=threw["name"] if threw else None if output is None else decode_value(bytes.fromhex(output)),
            writes=tuple(_stored(position, write) for write in answer["writes"]),
        )

    def load(self, kv: Dump) -> dict[str, str]:
        """The kinds of all entries of a dump by place, as the reference engine reads them."""
        pairs = [(key.hex(), value.hex()) for key, value in sorted(kv.items())]
        answer = self._ask(kv=pairs, alarm=None, mail=[], now=START_MS, effects=[], action="load")
        return dict(answer["entries"])

    def rewrite(
        self, *, values: Sequence[bytes] = (), keys: Sequence[Any] = (), kv: Mapping[bytes, bytes] | None = None
    ) -> tuple[list[str], list[bytes], Dump]:
        """What it makes of values and of a namespace that it reads and writes again, and its bytes for keys.

        Returns:
            The values as hex, or what was wrong with one; the keys, packed; all pairs.
        """
        pairs = [(key.hex(), value.hex()) for key, value in sorted((kv or {}).items())]
        answer = self._ask(action="rewrite", values=[value.hex() for value in values], keys=keys, kv=pairs)
        packed = [bytes.fromhex(key) for key in answer["keys"]]
        return answer["values"], packed, {bytes.fromhex(key): bytes.fromhex(value) for key, value in answer["kv"]}

    def _ask(self, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, "the node process ended"
        answer: dict[str, Any] = json.loads(line)
        assert "failure" not in answer, answer["failure"]
        return answer


def _stored(position: Position, stored: dict[str, Any]) -> Position:
    kv = {bytes.fromhex(key): bytes.fromhex(value) for key, value in stored["kv"]}
    mail = tuple(
        Mail(found["id"], found["name"], bytes.fromhex(found["body"]), found["sentAt"]) for found in stored["mail"]
    )
    return Position(kv, stored["alarm"], mail, position.now_ms, tuple(stored["effects"]))


@contextmanager
def reference_engine() -> Iterator[ReferenceEngine]:
    """Start the reference engine; it ends with the block."""
    assert (INSTALLED / "node_modules").is_dir(), "the reference engine is not installed; run `make reference`"
    for source in Path(__file__).parent.glob("*.mjs"):
        copy = INSTALLED / f"{source.name}.{os.getpid()}"  # other test processes do the same
        shutil.copyfile(source, copy)
        copy.replace(INSTALLED / source.name)
    with subprocess.Popen(
        ["node", "driver.mjs"],
        cwd=INSTALLED,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        yield ReferenceEngine(process)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        assert process.wait(10) == 0, "the node process ended badly"


async def run_ours(
    namespace: Namespace, mode: RunMode, position: Position, fn: Workflow, input: object, action: str = "run"
) -> Position:
    """Run the workflow in an empty namespace of ours, until it waits or has ended; the process dies then.

    `action` is that of `ReferenceEngine.run`.
    """
    effects[:] = position.effects
    driver = await namespace.driver()
    await driver.batch(Batch(puts=_with_mail(position)))
    if position.alarm_ms is not None:
        await driver.set_alarm(WORKFLOW_ID, position.alarm_ms)
    state, result, writes = "threw", None, list[Position]()

    async def stored() -> Position:
        return _without_mail(await namespace.dump(), position, await driver.get_alarm(WORKFLOW_ID))

    async def note_write() -> None:
        writes.append(await stored())

    driver.on_write = note_write
    async with Host(namespace, mode, WORKFLOW_ID, MovableClock(position.now_ms)) as process:
        if action == "recover":
            await process.control("recover")
        elif action != "run":
            await replay_from_step(driver, action, clock=process.clock)
        try:
            stopped = await process.stop(fn, input)
        except WorkflowFailedError as error:
            result = error.name
        else:
            state, result = stopped.state.value, stopped.output
        return replace(await stored(), state=state, result=result, writes=tuple(writes))


def _with_mail(position: Position) -> list[tuple[bytes, bytes]]:
    pairs = list(position.kv.items())
    for place, mail in enumerate(position.mail):
        message = MailboxMessage(mail.id, mail.name, mail.body, mail.sent_at_ms)
        pairs.append((layout.message_key(place), encode_message(message)))
    return pairs


def _without_mail(kv: Dump, position: Position, alarm_ms: int | None) -> Position:
    mail: list[Mail] = []
    for key, value in sorted(kv.items()):
        if key.startswith(layout.MAILBOX_PREFIX):
            message = decode_message(value)
            mail.append(Mail(message.id, message.name, message.body, message.sent_at_ms))
    mailbox = (layout.MAILBOX_PREFIX, layout.DEDUP_PREFIX, layout.MAILBOX_SEQUENCE_KEY, layout.ALARM_KEY)
    left = {key: value for key, value in kv.items() if not key.startswith(mailbox)}
    return Position(left, alarm_ms, tuple(mail), position.now_ms, tuple(effects))
