"""What a supervisor says of itself, backups and reindexing while it runs, and workflows that are read after their end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import WorkflowNotFoundError, open_supervisor
from perdure.storage import CatalogRow, FileStore, StorageError
from perdure.workflow import Context, WorkflowFailedError, WorkflowState, workflow

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


async def effect(name: str) -> str:
    effects.append(name)
    return name


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.step("begin", effect, ctx.workflow_id)
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go", names=["go"])).body


@workflow(name="bad")
async def bad(ctx: Context, input: None) -> None:
    await ctx.step("begin", effect, ctx.workflow_id)
    raise ValueError("no")


class TestStats:
    async def test_an_empty_supervisor_has_done_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(nap) as supervisor:
            stats = await supervisor.stats()
            assert (stats.live, stats.sleeping, stats.faulted, stats.queued) == (0, 0, 0, 0)
            assert (stats.mailbox_total, stats.mailbox_largest, stats.commits, stats.activations) == (0, 0, 0, 0)
            assert (stats.commits_per_second, stats.commit_p50_ms, stats.commit_p99_ms) == (0.0, 0.0, 0.0)

    async def test_what_lives_sleeps_waits_and_was_done_is_counted(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(nap, waiter, bad) as supervisor:
            for number in range(3):
                await supervisor.spawn(nap, f"nap-{number}", 5_000)
            handle = await supervisor.spawn(waiter, "waiter-1")
            await supervisor.spawn(bad, "bad-1")
            await trio.sleep(1)
            for number in range(4):
                await handle.message("other", number)
            await (await supervisor.get("nap-0")).message("unread")
            await (await supervisor.get("nap-2")).evict()
            await trio.sleep(1)
            stats = await supervisor.stats()
            assert (stats.live, stats.sleeping, stats.faulted) == (3, 1, 0)
            assert (stats.mailbox_total, stats.mailbox_largest) == (5, 4)
            assert stats.activations == 5
            assert stats.commits == disk.store.written.count("batch")
            assert stats.commits_per_second > 0
            assert 0 < stats.commit_p50_ms <= stats.commit_p99_ms
        async with disk.process(nap, waiter, bad) as supervisor:
            stats = await supervisor.stats()
            assert (stats.live, stats.sleeping, stats.activations, stats.commits) == (0, 4, 0, 0)
            assert disk.store.opens == []


class TestReadingWhatHasEnded:
    async def test_nothing_is_run_or_written_to_read_it(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S34: after a restart, with its function registered or not."""
        async with disk.process(nap, bad) as supervisor:
            await (await supervisor.spawn(nap, "nap-1", 5)).result()
            await supervisor.spawn(bad, "bad-1")
            await (await supervisor.spawn(nap, "gone-1", 5)).cancel()
            await trio.sleep(1)
        effects.clear()
        for registered in ([nap, bad], [waiter]):
            async with disk.process(*registered) as supervisor:
                ended = await supervisor.get("nap-1")
                assert await ended.get_output() == "rested"
                assert await ended.result() == "rested"
                assert await ended.get_state() is WorkflowState.COMPLETED
                assert [entry.kind for entry in await ended.history()] == ["step", "sleep"]
                failed = await supervisor.get("bad-1")
                error = await failed.get_error()
                assert error is not None
                assert error.message == "no"
                with pytest.raises(WorkflowFailedError):
                    await failed.result()
                assert len(await failed.history()) == 1
                assert await (await supervisor.get("gone-1")).get_state() is WorkflowState.CANCELLED
                stats = await supervisor.stats()
                assert (stats.activations, stats.live, stats.commits) == (0, 0, 0)
                await trio.sleep(100)
                assert disk.store.written == []
                assert await supervisor.faulted() == []
        assert effects == []


class TestBackup:
    async def test_everything_is_copied_while_it_runs_and_goes_on_from_the_copy(
        self, disk: Disk, autojump_clock: MockClock, tmp_path: Path
    ) -> None:
        async with disk.process(nap, waiter) as supervisor:
            await (await supervisor.spawn(nap, "ended", 0)).result()
            await supervisor.spawn(nap, "asleep", 500, attributes={"customer": 7})
            handle = await supervisor.spawn(waiter, "waiter-1")
            await trio.sleep(1)
            assert await supervisor.backup(tmp_path / "copy") == {}
            await handle.message("go", "after the copy")
            assert await handle.result() == "after the copy"
            with pytest.raises(StorageError, match="copy"):
                await supervisor.backup(tmp_path / "copy")
        effects.clear()
        store = FileStore(tmp_path / "copy", durability="normal", commit_in="inline")
        async with open_supervisor(store, [nap, waiter], clock=disk.clock) as supervisor:
            assert {info.id: info.state for info in await supervisor.list()} == {
                "ended": WorkflowState.COMPLETED,
                "asleep": WorkflowState.SLEEPING,
                "waiter-1": WorkflowState.SLEEPING,
            }
            assert [info.id for info in await supervisor.list(attributes={"customer": 7})] == ["asleep"]
            handle = await supervisor.get("waiter-1")
            await handle.message("go", "in the copy")
            assert await handle.result() == "in the copy"
            await trio.sleep(600)
            assert await (await supervisor.get("asleep")).result() == "rested"
        assert effects == [], "nothing is done twice"

    @pytest.mark.parametrize("is_live", [True, False])
    async def test_one_workflow_is_copied_to_a_file(
        self, disk: Disk, autojump_clock: MockClock, tmp_path: Path, is_live: bool
    ) -> None:
        async with disk.process(nap) as supervisor:
            handle = await supervisor.spawn(nap, "nap-1", 500)
            await trio.sleep(1)
            if not is_live:
                await handle.evict()
            assert await supervisor.backup(tmp_path / "nap-1.sqlite", "nap-1") == {}
            assert (tmp_path / "nap-1.sqlite").stat().st_size > 0
            with pytest.raises(WorkflowNotFoundError):
                await supervisor.backup(tmp_path / "nap-2.sqlite", "nap-2")
            with pytest.raises(StorageError, match="exists"):
                await supervisor.backup(str(tmp_path / "nap-1.sqlite"), "nap-1")
            assert await handle.result() == "rested"


class TestReindex:
    async def test_a_catalog_that_lost_rows_is_put_right_and_what_is_due_runs(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S50: while all goes on; nothing runs twice."""
        async with disk.process(nap, waiter) as supervisor:
            await (await supervisor.spawn(nap, "ended", 0)).result()
            for name in ("dormant", "live"):
                await supervisor.spawn(nap, name, 500)
            await trio.sleep(1)
            await (await supervisor.get("dormant")).evict()
            await trio.sleep(1)
            effects.clear()
            # Somebody meddled with the catalog: who is asleep seems to have ended, who has ended to run.
            rows = {row.workflow_id: row for row in await disk.store.list_rows()}
            now_ms = disk.clock.now_ms()
            await disk.store.put_rows(
                [
                    CatalogRow("dormant", "nap", "completed", None, False, now_ms, now_ms),
                    CatalogRow("live", "nap", "completed", None, False, now_ms, now_ms),
                    CatalogRow("ended", "nap", "running", None, False, now_ms, now_ms),
                ]
            )
            assert await supervisor.reindex() == 3
            found = {row.workflow_id: row for row in await disk.store.list_rows()}
            assert {name: row.state for name, row in found.items()} == {
                "dormant": "sleeping",
                "live": "sleeping",
                "ended": "completed",
            }
            assert {name: row.created_at_ms for name, row in found.items()} == {
                name: row.created_at_ms for name, row in rows.items()
            }
            assert await supervisor.reindex() == 0
            await trio.sleep(600)
            assert await supervisor.count(state="completed") == 3
            assert effects == []

    async def test_a_sleeper_with_mail_that_it_does_not_wait_for_wakes_in_time_after_a_reindex(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S45, S50: its row, read from its file, says "at once"; that is right again before it leaves memory."""
        async with disk.process(nap, idle_timeout=10.0) as supervisor:
            handle = await supervisor.spawn(nap, "sleeper", 500)
            await handle.message("later", None)
            await trio.sleep(1)
            await supervisor.reindex()
            await trio.sleep(100)
            assert [info.is_live for info in await supervisor.list()] == [False]
            await trio.sleep(450)  # nobody asks for it, which would bring it in
            assert await supervisor.count(state="completed") == 1
            assert effects == ["sleeper"]

    @pytest.mark.parametrize("harm", ["deleted", "older", "garbage", "an older version"])
    async def test_a_catalog_that_was_harmed_between_two_lives_is_made_anew(
        self, disk: Disk, autojump_clock: MockClock, harm: str
    ) -> None:
        """S50: nothing lost, nothing run twice, whatever became of it."""
        async with disk.process(nap, waiter) as supervisor:
            await supervisor.spawn(nap, "early", 500)
            await trio.sleep(1)
        catalog = disk.path / "catalog.sqlite"
        if disk.kind == "sqlite":
            shutil.copy(catalog, disk.path.parent / "older")
        async with disk.process(nap, waiter) as supervisor:
            await supervisor.spawn(nap, "late", 50, attributes={"customer": 7})
            await supervisor.spawn(waiter, "waiter-1")
            await trio.sleep(100)
            await supervisor.delete("late")
            await supervisor.spawn(nap, "late", 900)
            await trio.sleep(1)
        if disk.kind == "sqlite":
            match harm:
                case "deleted":
                    catalog.unlink()
                case "older":
                    shutil.copy(disk.path.parent / "older", catalog)
                case "garbage":
                    catalog.write_bytes(b"garbage " * 5_000)
                case _:
                    import sqlite3

                    connection = sqlite3.connect(catalog)
                    connection.execute("PRAGMA user_version = 1")
                    connection.close()
        async with disk.process(nap, waiter) as supervisor:
            assert sorted(info.id for info in await supervisor.list()) == ["early", "late", "waiter-1"]
            await trio.sleep(1_000)
            assert {info.id: info.state.value for info in await supervisor.list()} == {
                "early": "completed",
                "late": "completed",
                "waiter-1": "sleeping",
            }
            handle = await supervisor.get("waiter-1")
            await handle.message("go", 7)
            assert await handle.result() == 7
        assert sorted(effects) == ["early", "late", "late"]
