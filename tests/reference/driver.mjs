// A host for the reference engine: runs a workflow on a dump of its namespace, and says what is stored then.
//
// 1. One JSON object a line, a request on stdin and its answer on stdout; keys, values and user data are hex. Nothing is kept
//    from one request to the next, except what the answer says and the next request brings.
// 2. The namespace is a map from key to value. `writes` holds all of it after every write, so that each of them can be taken
//    for the moment at which the process died.
// 3. Time is given: it stands at `now` (ms) while a workflow runs. The engine polls for nothing (workerPollInterval is 0), so
//    every wait returns to us.
// 4. A write takes until the next turn of the event loop. (While one is under way, the engine forgets what else changes: a
//    shorter one, `isHasty`, loses names that branches use meanwhile, a longer one the outcomes of their steps.)
// 5. There is no mailbox in a namespace of the reference engine: its host has the messages, here `mail`, oldest first.

import { createInterface } from "node:readline";
import { setImmediate as nextTurn } from "node:timers/promises";

import { decode, encode } from "cbor-x";
import * as tuple from "fdb-tuple";
import * as engine from "@rivetkit/workflow-engine";

import { WORKFLOWS } from "./workflows.mjs";

const WORKFLOW_ID = "workflow-1";

const toHex = (bytes) => Buffer.from(bytes).toString("hex");
const fromHex = (hex) => new Uint8Array(Buffer.from(hex, "hex"));
const valueFrom = (hex) => (hex === null ? undefined : decode(fromHex(hex)));
const valueTo = (value) => (value === undefined ? null : toHex(encode(value)));

class Driver {
	atomicBatch = true;
	workerPollInterval = 0;
	writes = [];

	constructor(request, world) {
		this.world = world;
		this.isHasty = request.isHasty;
		this.kv = new Map(request.kv);
		this.alarm = request.alarm;
		this.mail = [...request.mail];
		this.messageDriver = {
			addMessage: async (message) => {
				this.mail.push({ ...message, body: valueTo(message.data) });
			},
			receiveMessages: async ({ names, count }) => {
				const taken = this.mail.filter((message) => !names || names.includes(message.name)).slice(0, count);
				this.mail = this.mail.filter((message) => !taken.includes(message));
				return taken.map(({ id, name, body, sentAt }) => ({ id, name, sentAt, data: valueFrom(body) }));
			},
			completeMessage: async () => {},
		};
	}

	pairs() {
		return [...this.kv].sort(([a], [b]) => (a < b ? -1 : 1));
	}

	async #wrote() {
		const { alarm, mail, world } = this;
		this.writes.push({ kv: this.pairs(), alarm, mail: [...mail], effects: [...world.effects] });
		if (!this.isHasty) await nextTurn();
	}

	async get(key) {
		const value = this.kv.get(toHex(key));
		return value === undefined ? null : fromHex(value);
	}

	async list(prefix) {
		const start = toHex(prefix);
		const found = this.pairs().filter(([key]) => key.startsWith(start));
		return found.map(([key, value]) => ({ key: fromHex(key), value: fromHex(value) }));
	}

	async set(key, value) {
		await this.batch([{ key, value }]);
	}

	async batch(writes) {
		for (const { key, value } of writes) this.kv.set(toHex(key), toHex(value));
		await this.#wrote();
	}

	async #drop(isGone) {
		for (const key of [...this.kv.keys()]) if (isGone(key)) this.kv.delete(key);
		await this.#wrote();
	}

	async delete(key) {
		await this.batchDelete([key]);
	}

	async batchDelete(keys) {
		const gone = new Set(keys.map(toHex));
		await this.#drop((key) => gone.has(key));
	}

	async deletePrefix(prefix) {
		const start = toHex(prefix);
		await this.#drop((key) => key.startsWith(start));
	}

	async deleteRange(start, end) {
		const [from, to] = [toHex(start), toHex(end)];
		await this.#drop((key) => key >= from && key < to);
	}

	async setAlarm(workflowId, wakeAt) {
		this.alarm = wakeAt;
		await this.#wrote();
	}

	async clearAlarm() {
		this.alarm = null;
		await this.#wrote();
	}

	async waitForMessages() {
		throw new Error("only runs in yield mode are asked for");
	}
}

/** Everything as the engine and its libraries write it once they have read it; what they cannot read, as the error. */
async function rewrite({ values, keys, kv }) {
	const read = (hex) => {
		try {
			return valueTo(valueFrom(hex)) ?? "f7";
		} catch (error) {
			return String(error);
		}
	};
	const driver = new Driver({ kv, alarm: null, mail: [] }, { effects: [] });
	const storage = await engine.loadStorage(driver);
	for (const entry of storage.history.entries.values()) entry.dirty = true;
	for (const metadata of storage.entryMetadata.values()) metadata.dirty = true;
	await engine.flush(storage, driver);
	return { values: values.map(read), keys: keys.map((key) => toHex(tuple.pack(key))), kv: driver.pairs() };
}

async function answer(request) {
	if (request.action === "rewrite") return rewrite(request);
	const world = { effects: [...request.effects] };
	const driver = new Driver(request, world);
	Date.now = () => request.now;
	const outcome = {};
	const workflow = WORKFLOWS[request.workflow];
	if (request.action === "load") {
		const storage = await engine.loadStorage(driver);
		outcome.entries = [...storage.history.entries].map(([place, entry]) => [place, entry.kind.type]);
	} else {
		const run = (ctx, input) => workflow(ctx, input, world);
		const input = valueFrom(request.input);
		if (request.action === "recover") {
			// A handle comes with a run of a workflow; this one is kept from running.
			const handle = engine.runWorkflow(WORKFLOW_ID, () => new Promise(() => {}), input, driver);
			handle.result.catch(() => {});
			await handle.recover();
		} else if (request.action !== "run") {
			await engine.replayWorkflowFromStep(WORKFLOW_ID, driver, request.action);
		}
		try {
			const result = await engine.runWorkflow(WORKFLOW_ID, run, input, driver).result;
			outcome.state = result.state;
			outcome.output = valueTo(result.output);
			outcome.waitingFor = result.waitingForMessages ?? null;
		} catch (error) {
			outcome.threw = { name: error.name, message: error.message };
		}
	}
	return {
		...outcome,
		kv: driver.pairs(),
		alarm: driver.alarm,
		mail: driver.mail,
		writes: driver.writes,
		effects: world.effects,
	};
}

for await (const line of createInterface({ input: process.stdin })) {
	let reply;
	try {
		reply = await answer(JSON.parse(line));
	} catch (error) {
		reply = { failure: error.stack };
	}
	process.stdout.write(`${JSON.stringify(reply)}\n`);
}
