"""Encrypt what workflows store, and rotate the key under one that is under way.

    pip install cryptography
    python examples/encryption.py

1. `Vault` is the codec: AES-GCM, which encrypts data and makes any change of it known. The workflow's id and the kind of the
   value go in as associated data, so a value that somebody moves to another workflow cannot be decrypted there.
2. It writes with the first of its keys and reads with any. To rotate, put a new key in front; take the old one away once
   nothing that was written with it is needed any more.
3. A wrong key is no failure of the workflow: nothing is written, and with the right key it goes on.

Where the keys come from is not shown: a key service, or the environment. Losing them is losing the workflows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure.actors import open_supervisor
from perdure.storage import ValueCodecError, ValueContext
from perdure.workflow import Context, HistoryUpdated, workflow

ID_BYTES = 4
NONCE_BYTES = 12
TAG_BYTES = 16


class Vault:
    """A value codec over AES-GCM keys of 16, 24 or 32 bytes; the first one encrypts."""

    overhead_bytes = ID_BYTES + NONCE_BYTES + TAG_BYTES

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = {sha256(b"key id" + key).digest()[:ID_BYTES]: AESGCM(key) for key in keys}
        self._current = next(iter(self._ciphers))

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        # 96 random bits never met again: good for some billions of values a key. Rotate before.
        nonce = os.urandom(NONCE_BYTES)
        return self._current + nonce + self._ciphers[self._current].encrypt(nonce, data, bound_to(context))

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        key_id, nonce = data[:ID_BYTES], data[ID_BYTES : ID_BYTES + NONCE_BYTES]
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise LookupError(f"no key with the id {key_id.hex()}")
        try:
            return cipher.decrypt(nonce, data[ID_BYTES + NONCE_BYTES :], bound_to(context))
        except InvalidTag:
            raise ValueError("the data was changed, or is another value's") from None


def bound_to(context: ValueContext) -> bytes:
    """Whose and what a value is, without two ways to read it: kinds hold no NUL."""
    return context.kind.encode() + b"\0" + context.workflow_id.encode()


@workflow
async def payout(ctx: Context, account: str) -> str:
    """Pay to an account once somebody has approved."""
    reference = await ctx.step("reserve", reserve, account)
    approval = await ctx.queue.next("approval", names=["approved"])
    return f"{reference}, approved by {approval.body}"


async def reserve(account: str) -> str:
    print("  reserved for account", account)
    return f"reservation for {account}"


ACCOUNT = "DE02 1203 0000 0000 2020 51"


async def main(data: Path) -> None:
    old_key, new_key = AESGCM.generate_key(bit_length=256), AESGCM.generate_key(bit_length=256)

    print("with the old key:")
    is_recorded = trio.Event()

    def notice(update: HistoryUpdated) -> None:
        if update.entries:
            is_recorded.set()

    async with open_supervisor(data, [payout], codec=Vault([old_key]), on_history_updated=notice) as supervisor:
        await supervisor.spawn(payout, "payout-7", ACCOUNT)
        await is_recorded.wait()

    print("with the new key alone:")
    async with open_supervisor(data, [payout], codec=Vault([new_key])) as supervisor:
        handle = await supervisor.get("payout-7")
        try:
            await handle.message("approved", "Ada", id="approval-7")
        except ValueCodecError as error:
            print(f"  refused: the {error.kind} of {error.workflow_id} cannot be decoded")

    print("with both, the new one in front:")
    async with open_supervisor(data, [payout], codec=Vault([new_key, old_key])) as supervisor:
        handle = await supervisor.get("payout-7")
        await handle.message("approved", "Ada", id="approval-7")
        print("  result:", await handle.result())

    show_what_is_legible(data)


def show_what_is_legible(data: Path) -> None:
    stored = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    print("in the files:")
    print("  the account:   ", "found" if ACCOUNT.encode() in stored else "not found")
    print("  the step's name:", "found" if b"reserve" in stored else "not found")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Encrypt what workflows store.")
    parser.add_argument("--data", type=Path, default=Path("encryption-data"))
    trio.run(main, parser.parse_args().data)
