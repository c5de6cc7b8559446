"""Known bugs of durable engines, planted in ours: batches, waits and mailboxes (`perdure.workflow`)."""

from __future__ import annotations

from typing import Final

from mutant import Change, Mutant

__all__ = ["ENGINE_MUTANTS"]


def _in(module: str, before: str, after: str) -> Change:
    return Change(f"perdure.workflow.{module}", before, after)


ENGINE_MUTANTS: Final = (
    # Acknowledged before it is durable.
    Mutant(
        "acknowledge-before-commit",
        "a message to a workflow that runs is acknowledged, and handed to its readers, before it is durable",
        "S27 S39 S43",
        (
            _in(
                "control",
                "    await activation.commit_from_outside()\n    if letter is not None:\n",
                "    if not activation.is_running:\n        await activation.commit_from_outside()\n"
                "    if letter is not None:\n",
            ),
        ),
    ),
    Mutant(
        "offer-before-commit",
        "a message is handed to its readers before it is durable",
        "S27 S39",
        (
            _in(
                "control",
                "    await activation.commit_from_outside()\n    if letter is not None:\n"
                "        activation.offer([letter])\n",
                "    if letter is not None:\n        activation.offer([letter])\n"
                "    await activation.commit_from_outside()\n"
                "    if letter is not None:\n",
            ),
        ),
    ),
    Mutant(
        "step-before-commit",
        "a step returns its result before that is durable",
        "S39 S43",
        (
            _in(
                "step",
                "        elif not activation.commit_nowait():\n            await activation.commit()\n",
                "        else:\n            await trio.lowlevel.checkpoint()\n",
            ),
        ),
    ),
    Mutant(
        "shared-commit-told-early",
        "whoever asks for a commit while a batch is being written is told that it is durable",
        "S15 S39",
        (
            _in(
                "committer",
                "            await self._hand_over(batch, is_declined=self._declined_version == version)\n",
                "            is_declined, self.durable_version = self._declined_version == version, version\n"
                "            await self._hand_over(batch, is_declined=is_declined)\n",
            ),
        ),
    ),
    Mutant(
        "reply-before-commit",
        "a reply is handed to whoever asked before it is durable",
        "S28 S39",
        (
            _in(
                "completion",
                "        await activation.commit()\n        activation.answered(self._message_id, data)\n",
                "        activation.answered(self._message_id, data)\n        await activation.commit()\n",
            ),
        ),
    ),
    Mutant(
        "cancel-before-commit",
        "`cancel()` of a workflow that nothing runs returns without having written it",
        "S32",
        (
            _in(
                "control",
                "        activation.close(Closing.CANCELLED)\n        await activation.commit_from_outside()\n",
                "        activation.close(Closing.CANCELLED)\n        if activation.is_running:\n"
                "            await activation.commit_from_outside()\n",
            ),
        ),
    ),
    Mutant(
        "wake-before-commit",
        "`wake()` lets a sleep go on before it is durable that it was ended",
        "S24 S39",
        (
            _in(
                "control",
                "    await activation.commit_from_outside()\n    activation.wake_parked()\n",
                "    activation.wake_parked()\n",
            ),
        ),
    ),
    # One transition in two batches.
    Mutant(
        "consume-and-record-in-two-batches",
        "that a message was taken out of the mailbox is committed before the record of its reading",
        "S27 S39",
        (
            _in(
                "queue",
                "        operation.progress()\n        if deadline is not None and deadline_ms is not None:\n",
                "        operation.progress()\n        await activation.commit()\n"
                "        if deadline is not None and deadline_ms is not None:\n",
            ),
        ),
    ),
    Mutant(
        "prune-outside-the-batch",
        "a loop's old iterations are forgotten in a batch of their own, before the state that makes them superfluous",
        "S12 S39",
        (
            _in(
                "loop",
                "        activation.history.change(self._node, LoopEntry(self.state_data, self._iteration, None))\n"
                "        if self._iteration % prune_interval == 0:\n",
                "        if self._iteration % prune_interval == 0:\n"
                "            self._prune(self._iteration - history_size)\n"
                "            await activation.commit()\n"
                "        activation.history.change(self._node, LoopEntry(self.state_data, self._iteration, None))\n"
                "        if self._iteration % prune_interval == 0:\n",
            ),
        ),
    ),
    Mutant(
        "end-in-two-batches",
        "a workflow is durably completed before its output is",
        "S39 S43",
        (
            _in(
                "activation",
                "                self.history.apply(WorkflowEvent.COMPLETE)\n",
                "                self.history.apply(WorkflowEvent.COMPLETE)\n"
                "                await self.commit_from_outside()\n",
            ),
        ),
    ),
    Mutant(
        "names-flushed-late",
        "a new name is written into the registry with the batch after the one that refers to it",
        "S15 S39",
        (
            _in(
                "history",
                "            self.pending.put(layout.name_key(number), name.encode())\n",
                '            late = self.__dict__.setdefault("_late_names", [])\n'
                "            while late:\n"
                "                self.pending.put(*late.pop())\n"
                "            late.append((layout.name_key(number), name.encode()))\n",
            ),
        ),
    ),
    # Waiting and waking.
    Mutant(
        "alarm-armed-late",
        "that a workflow sleeps is committed before its alarm",
        "S24 S39",
        (
            _in(
                "activation",
                "        self.history.set_alarm(wait.deadline_ms)\n        self.history.set_idle_activations(0)\n",
                "        self.history.set_idle_activations(0)\n",
            ),
            _in(
                "activation",
                "        if not self.is_parked_late:\n            await self.commit()\n",
                "        if not self.is_parked_late:\n            await self.commit()\n"
                "            if was_quiet and self.waiting is not None:\n"
                "                self.history.set_alarm(self.waiting.deadline_ms)\n"
                "                await self.commit()\n",
            ),
        ),
    ),
    Mutant(
        "park-loses-a-message",
        "a message that comes while the branch that wants it makes its parking durable does not wake it",
        "S26 S45",
        (
            _in(
                "waits",
                "        if self.is_woken:\n            await trio.lowlevel.checkpoint()\n"
                "        elif self.wait.deadline_ms is None:\n",
                "        if self.wait.deadline_ms is None:\n",
            ),
        ),
    ),
    Mutant(
        "evict-message-race",
        "a message that meets an eviction is kept, and nobody brings the workflow back for it",
        "S33 S45",
        (
            _in(
                "control",
                "    if activation.closing in (Closing.PARKED, Closing.EVICTED) and not activation.history.state.is_terminal:\n",
                "    if activation.closing is Closing.PARKED and not activation.history.state.is_terminal:\n",
            ),
        ),
    ),
    Mutant(
        "sleep-deadline-recomputed",
        "a sleep begins anew with each run, instead of ending when the first run said",
        "S24",
        (
            _in(
                "sleep",
                "        operation.check_is_next()\n        deadline_ms = kind.deadline_ms\n",
                "        operation.check_is_next()\n",
            ),
        ),
    ),
    Mutant(
        "read-deadline-recomputed",
        "the timeout of a queue read begins anew with each run",
        "S26",
        (
            _in(
                "queue",
                '    label = "*" if names is None else "|".join(names)\n',
                "    elif timeout_ms is not None:\n        deadline_ms = activation.clock.now_ms() + timeout_ms\n"
                '    label = "*" if names is None else "|".join(names)\n',
            ),
        ),
    ),
    Mutant(
        "deadline-not-stored",
        "a workflow's deadline is known to the process that began it only",
        "S39",
        (
            _in(
                "history",
                "            self.pending.put(layout.DEADLINE_KEY, layout.encode_u64(deadline_ms))\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "cancel-leaves-the-alarm",
        "a cancelled workflow keeps its alarm, and is brought back by it",
        "S32",
        (
            _in(
                "control",
                "        history.apply(WorkflowEvent.CANCEL)\n        history.set_alarm(None)\n",
                "        history.apply(WorkflowEvent.CANCEL)\n",
            ),
        ),
    ),
    # The mailbox.
    Mutant(
        "dedup-forgotten",
        "the ids of messages are remembered by the process only",
        "S27",
        (
            _in(
                "mailbox",
                "            self._pending.put(layout.dedup_key(message.id), layout.encode_u64(letter.sequence))\n",
                "",
            ),
        ),
    ),
    Mutant(
        "mailbox-in-order-of-ids",
        "messages of several names are read in the order of their ids, not in that of their sending",
        "S26",
        (
            _in(
                "mailbox", "        heads = [(queue[0].sequence, name)", "        heads = [(queue[0].message.id, name)"
            ),
            _in(
                "mailbox",
                "heapq.heapreplace(heads, (queue[0].sequence, name))",
                "heapq.heapreplace(heads, (queue[0].message.id, name))",
            ),
        ),
    ),
    Mutant(
        "given-back-to-the-end",
        "a message that a race's loser had read goes back to the end of the mailbox",
        "S29",
        (
            _in(
                "mailbox",
                "        if sequence is None or sequence in self._in_front:\n"
                "            sequence = self.place_in_front()\n",
                "        if sequence is None or sequence >= 0:\n            sequence = self._next_sequence\n"
                "            self._next_sequence += 1\n",
            ),
        ),
    ),
    Mutant(
        "mailbox-number-not-stored",
        "the number of the next message is known to the process only, so an emptied mailbox counts from 0 again",
        "S26 S29",
        (
            _in(
                "mailbox",
                "        self._pending.put(layout.MAILBOX_SEQUENCE_KEY, layout.encode_u64(self._next_sequence))\n",
                "",
            ),
        ),
    ),
    Mutant(
        "request-forgotten-with-its-reply",
        "that a request is open is not stored, so its reply after a restart goes to nobody",
        "S28",
        (
            _in(
                "requests",
                "        self._pending.put(layout.open_request_key(request_id), layout.encode_u64(sequence))\n",
                "",
            ),
        ),
    ),
)
"""In the order of the list that is printed."""
