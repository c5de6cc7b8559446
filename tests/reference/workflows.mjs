// The workflows of tests/vectors/README.md, and more of them, one or two for each primitive, as the reference engine has
// them. tests/support/vectors.py and tests/reference/twins.py have the same ones in Python: entry for entry, name for name.
// `world` is what lasts beside the workflow: the effects of its steps, in order.

import { CriticalError, Loop } from "@rivetkit/workflow-engine";

const YEAR_2100 = 4102444800000;

const did = (world, effect, value) => async () => {
	world.effects.push(effect);
	return value;
};

/** Fails the first times it is called, by the count of its effects, and returns how often it was. */
const flaky = (world, effect, failures, Failure = Error) => async () => {
	const attempt = 1 + world.effects.filter((done) => done.startsWith(effect)).length;
	world.effects.push(`${effect} ${attempt}`);
	if (attempt <= failures) throw new Failure(`boom ${attempt}`);
	return attempt;
};

const fails = (world, effect, error) => async () => {
	world.effects.push(effect);
	throw error;
};

const counting = (pauseAt) => (ctx, until, world) =>
	ctx.loop({
		name: "count",
		state: { total: 0 },
		run: async (inner, state) => {
			const total = await inner.step("add", did(world, `add ${state.total}`, state.total + 1));
			if (total === pauseAt) await inner.sleepUntil("pause", YEAR_2100);
			return total === until ? Loop.break({ total }) : Loop.continue({ total });
		},
	});

// Those of the recordings.

async function order(ctx, orderId, world) {
	const payment = await ctx.step("process-payment", did(world, "pay", { id: `pay-${orderId}`, cents: 1999 }));
	const message = await ctx.queue.next("wait-shipping", { names: ["shipment-confirmed"] });
	await ctx.step("notify-customer", did(world, "notify"));
	return { orderId, payment, tracking: message.body };
}

const retry = (ctx, _, world) =>
	ctx.step({ name: "flaky", maxRetries: 3, retryBackoffBase: 1, run: flaky(world, "attempt", 2) });

async function sleep(ctx, { at }) {
	await ctx.sleepUntil("new-year-2100", at);
	return "woke";
}

const join = (ctx, _, world) =>
	ctx.join("fetch-all", {
		user: { run: (branch) => branch.step("get", did(world, "get", { name: "Ada" })) },
		posts: { run: async (branch) => (await branch.queue.next("posts-ready", { names: ["posts"] })).body },
		stats: {
			run: async (branch) => {
				await branch.step("one", did(world, "one", 1));
				await branch.step("two", did(world, "two", 2));
				return 2;
			},
		},
	});

const race = (ctx, _, world) =>
	ctx.race("first", [
		{ name: "slow", run: (branch) => branch.sleepUntil("wait", YEAR_2100) },
		{ name: "fast", run: (branch) => branch.step("work", did(world, "work", "fast")) },
	]);

const undone = (world, name, value, undo) => ({
	name,
	run: did(world, name, value),
	rollback: undo ?? (async (_, output) => void world.effects.push(`undo ${name} ${output}`)),
});

async function rollback(ctx, _, world) {
	await ctx.rollbackCheckpoint("billing");
	await ctx.step(undone(world, "reserve", "r1"));
	await ctx.step(undone(world, "charge", "c1"));
	await ctx.step("ship", fails(world, "ship", new CriticalError("out of stock")));
}

async function migrate(ctx, _, world) {
	await ctx.removed("old-validation", "step");
	const version = await ctx.getVersion("pricing", 2);
	return ctx.step("price", did(world, "price", version * 10));
}

async function values(ctx, input, world) {
	const numbers = [Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, 0, 0.1, 1e300];
	const outputs = {
		undefined: undefined,
		null: null,
		bigint: 123456789012345678901234567890n,
		date: new Date(1700000000123),
		set: new Set([1, 2, 3]),
		map: new Map([["k", 1], [2, "v"]]),
		nan: numbers,
		long: "x".repeat(300),
	};
	const got = {};
	for (const [name, output] of Object.entries(outputs)) got[name] = await ctx.step(name, did(world, name, output));
	return { input, b: got.null ?? null, g: got.nan.length, h: got.long.length };
}

async function tried(ctx, _, world) {
	const run = fails(world, "charge", new CriticalError("declined"));
	const { failure } = await ctx.tryStep({ name: "charge", maxRetries: 0, run });
	return { kind: failure.kind, message: failure.error.message, attempts: failure.attempts };
}

class PaymentError extends Error {
	name = "PaymentError";
	code = 402;
	details = { card: "x" };
}

async function errmeta() {
	throw new PaymentError("custom");
}

// One or two for each primitive.

async function batch(ctx) {
	const both = await ctx.queue.nextBatch("both", { names: ["a", "b"], count: 3, timeout: 60_000 });
	const none = await ctx.queue.nextBatch("none", { names: ["c"], timeout: 5_000 });
	const any = await ctx.queue.next("any");
	return { both: both.map(({ name, body }) => [name, body]), none: none.length, any: [any.name, any.body] };
}

const listen = (ctx, _, world) =>
	ctx.loop("listen", async (inner) => {
		const { body } = await inner.queue.next("word", { names: ["word"] });
		await inner.step("say", did(world, `say ${body}`));
		if (body === "end") return Loop.break(undefined);
	});

async function empty(ctx, at, world) {
	const seen = [await ctx.step("nothing", did(world, "nothing"))];
	seen.push(await ctx.loop({ name: "once", state: null, run: async () => Loop.break(undefined) }));
	seen.push(await ctx.step("zero", did(world, "zero", 0)), await ctx.step("text", did(world, "text", "")));
	seen.push(await ctx.step("list", did(world, "list", [])), await ctx.step("no", did(world, "no", false)));
	await ctx.sleepUntil("pause", at);
	await ctx.step("last", did(world, "last"));
	return seen.map((value) => value ?? null);
}

async function exhausted(ctx, at, world) {
	let caught;
	try {
		await ctx.step({ name: "fetch", maxRetries: 2, retryBackoffBase: 1, run: flaky(world, "fetch", 9) });
	} catch (error) {
		// The context's own signals are exceptions here.
		if (error.name !== "StepExhaustedError") throw error;
		caught = error.name;
	}
	await ctx.sleepUntil("pause", at);
	return [caught, await ctx.step("instead", did(world, "instead", "cached"))];
}

async function recovered(ctx, _, world) {
	await ctx.step("before", did(world, "before"));
	return ctx.step({ name: "fetch", maxRetries: 1, retryBackoffBase: 1, run: flaky(world, "fetch", 2) });
}

const twice = async (ctx, _, world) => [
	await ctx.step({ name: "a", maxRetries: 0, run: flaky(world, "a", 1) }),
	await ctx.step({ name: "b", maxRetries: 0, run: flaky(world, "b", 1) }),
];

async function names(ctx, at, world) {
	for (const name of ["naïve ✓", "漢字", "مرحبا", "🎉", "q:count", "a/b", "~0", "x".repeat(300)]) {
		await ctx.step(name, did(world, name));
	}
	await ctx.sleepUntil("pause", at);
	await ctx.step("last", did(world, "last"));
}

const fan = (ctx, at, world) =>
	ctx.join("all", {
		slow: {
			run: async (branch) => {
				await branch.step("begin", did(world, "begin", 1));
				await branch.sleepUntil("nap", at);
				return branch.step("end", did(world, "end", 2));
			},
		},
		mail: { run: async (branch) => (await branch.queue.next("letter", { timeout: 200_000 })).body },
		none: { run: (branch) => branch.step("nothing", did(world, "nothing")) },
		empty: { run: async () => undefined },
	});

async function partial(ctx, at, world) {
	let failed;
	try {
		await ctx.join("all", {
			good: { run: (branch) => branch.step("good", did(world, "good", "fine")) },
			bad: { run: (branch) => branch.step("bad", fails(world, "bad", new CriticalError("declined"))) },
			ugly: {
				run: async (branch) => {
					await branch.queue.next("ready");
					throw new Error("plain");
				},
			},
		});
	} catch (error) {
		if (error.name !== "JoinError") throw error;
		failed = Object.keys(error.errors).sort();
	}
	await ctx.sleepUntil("pause", at);
	return [failed, await ctx.step("after", did(world, "after", "went on"))];
}

async function deadline(ctx, at, world) {
	const { winner, value } = await ctx.race("first", [
		{ name: "answer", run: async (branch) => (await branch.queue.next("answer", { names: ["answer"] })).body },
		{
			name: "late",
			run: async (branch) => {
				await branch.sleepUntil("limit", at);
				return branch.step("give up", did(world, "give up", "late"));
			},
		},
	]);
	await ctx.sleepUntil("pause", 2 * at);
	return [winner, value, await ctx.step("after", did(world, "after", "went on"))];
}

async function lost(ctx, at, world) {
	let caught;
	try {
		await ctx.race("first", [
			{ name: "a", run: (branch) => branch.step("a", fails(world, "a", new CriticalError("declined"))) },
			{
				name: "b",
				run: async (branch) => {
					await branch.sleepUntil("nap", at);
					throw new Error("plain");
				},
			},
		]);
	} catch (error) {
		if (error.name !== "RaceError") throw error;
		caught = error.name;
	}
	await ctx.sleepUntil("pause", 2 * at);
	return [caught, await ctx.step("after", did(world, "after", "went on"))];
}

async function block(ctx, at, world) {
	const { failure } = await ctx.try("careful", async (inner) => {
		await inner.step("one", did(world, "one", 1));
		await inner.sleepUntil("nap", at);
		await inner.step({ name: "two", maxRetries: 0, run: fails(world, "two", new CriticalError("declined")) });
	});
	const { value } = await ctx.try("easy", (inner) => inner.step("three", did(world, "three", 3)));
	await ctx.sleepUntil("pause", 2 * at);
	await ctx.step("after", did(world, "after"));
	return [failure.source, failure.name, failure.error.message, value];
}

async function attempted(ctx, at, world) {
	const run = flaky(world, "fetch", 9);
	const { ok, failure } = await ctx.tryStep({ name: "fetch", maxRetries: 1, retryBackoffBase: 1, run });
	await ctx.sleepUntil("pause", at);
	await ctx.step("after", did(world, "after"));
	return [ok, failure.kind, failure.stepName, failure.attempts, failure.error.name, failure.error.message];
}

async function jobs(ctx, at, world) {
	const job = await ctx.queue.next("job", { names: ["job"], completable: true });
	await ctx.step("work", did(world, `work on ${job.body}`));
	await ctx.sleepUntil("pause", at);
	await job.complete();
	const more = await ctx.queue.nextBatch("more", { names: ["job"], count: 2, completable: true });
	for (const message of more) await message.complete();
	await ctx.sleepUntil("end", 2 * at);
	return [job, ...more].map((message) => message.body);
}

async function upgraded(ctx, at, world) {
	await ctx.step("begin", did(world, "begin"));
	await ctx.sleepUntil("pause", at);
	await ctx.removed("old wait", "message");
	const version = await ctx.getVersion("pricing", 3);
	const seconds = await ctx.step("now", async () => Date.now() / 1000);
	await ctx.sleepUntil("end", 2 * at);
	return [version, seconds];
}

async function saga(ctx, at, world) {
	await ctx.rollbackCheckpoint("trip");
	await ctx.step(undone(world, "flight", 1));
	await ctx.sleepUntil("pause", at);
	await ctx.step(undone(world, "hotel", 2));
	await ctx.sleepUntil("end", 2 * at);
	await ctx.step(undone(world, "car", 3));
	throw new CriticalError("no seats");
}

async function stubborn(ctx, _, world) {
	await ctx.rollbackCheckpoint("start");
	await ctx.step(undone(world, "first", 1));
	const second = undone(world, "second", 2, flaky(world, "undo second", 1));
	await ctx.step({ ...second, retryBackoffBase: 1 });
	await ctx.step(undone(world, "third", 3));
	throw new CriticalError("no seats");
}

async function hidden(ctx, _, world) {
	await ctx.rollbackCheckpoint("start");
	await ctx.step(undone(world, "first", 1));
	await ctx.join("both", {
		a: { run: (branch) => branch.step(undone(world, "within", 2)) },
	});
	await ctx.tryStep({ name: "caught", maxRetries: 0, run: fails(world, "caught", new CriticalError("declined")) });
	await ctx.step(undone(world, "last", 3));
	throw new CriticalError("no seats");
}

async function rewound(ctx, at, world) {
	const seen = [await ctx.step("first", flaky(world, "first", 0))];
	await ctx.sleepUntil("pause", at);
	seen.push(await ctx.step("second", flaky(world, "second", 0)));
	await ctx.sleepUntil("end", 2 * at);
	seen.push(await ctx.step("third", flaky(world, "third", 0)));
	return seen;
}

const joined = (ctx, _, world) =>
	ctx.join("all", {
		good: { run: (branch) => branch.step("good", did(world, "good", 1)) },
		bad: { run: (branch) => branch.step({ name: "bad", maxRetries: 0, run: flaky(world, "bad", 1) }) },
	});

async function compensated(ctx, _, world) {
	await ctx.rollbackCheckpoint("start");
	await ctx.step(undone(world, "first", 1));
	return ctx.step({ name: "fetch", maxRetries: 0, run: flaky(world, "fetch", 1) });
}

const within = (ctx, _, world) =>
	ctx.join("outer", {
		raced: {
			run: async (branch) => {
				const { winner } = await branch.race("inner", [
					{ name: "word", run: (inner) => inner.queue.next("word", { names: ["word"] }) },
					{ name: "other", run: (inner) => inner.queue.next("other", { names: ["other"] }) },
				]);
				return winner;
			},
		},
		joined: {
			run: async (branch) => {
				const { a, b } = await branch.join("inner", {
					a: { run: (inner) => inner.step("work", did(world, "a", 1)) },
					b: { run: async (inner) => (await inner.queue.next("number", { names: ["number"] })).body },
				});
				return a + b;
			},
		},
	});

// What the reference engine does otherwise, or cannot go on with (test_limits.py).

const nested = (ctx, _, world) =>
	ctx.loop("outer", async (outer) => {
		await outer.loop("inner", async (inner) => {
			await inner.step("work", did(world, "work"));
			return Loop.break(null);
		});
		await outer.queue.next("next");
		return Loop.break("done");
	});

async function aliased(ctx, _, world) {
	const first = await ctx.step("count/~0/add", did(world, "slashes", "slashes"));
	await ctx.queue.next("next");
	const second = await ctx.loop("count", async (inner) =>
		Loop.break(await inner.step("add", did(world, "add", "added"))),
	);
	return [first, second];
}

const once = (maxRetries) => (ctx, _, world) => ctx.step({ name: "once", maxRetries, run: did(world, "once", "done") });

async function critical(ctx, _, world) {
	let caught;
	try {
		await ctx.step("charge", fails(world, "charge", new CriticalError("declined")));
	} catch (error) {
		if (error.name !== "CriticalError") throw error;
		caught = error.message;
	}
	await ctx.queue.next("next");
	return caught;
}

async function versioned(ctx, _, world) {
	await ctx.loop("inner", async (inner) => {
		await inner.step("work", did(world, "work"));
		return Loop.break(null);
	});
	await ctx.queue.next("next");
	return ctx.getVersion("pricing", 2);
}

const late = async (ctx) => (await ctx.queue.nextBatch("late", { names: ["late"], timeout: 1000 })).length;

const unreadable = (ctx) => ctx.step("value", did({ effects: [] }, "value"));

// Values that cross from one engine to the other.

/** What a value is here, as text. */
function described(value) {
	if (value === null || value === undefined) return String(value);
	if (Object.is(value, -0)) return "number -0";
	if (value instanceof Date) return `Date ${value.toISOString()}`;
	if (value instanceof Error) return `${value.constructor.name} ${value.message}`;
	if (value instanceof Uint8Array) return `bytes ${Buffer.from(value).toString("hex")}`;
	if (Array.isArray(value)) return `[${value.map(described).join(", ")}]`;
	if (value instanceof Set) return `Set ${described([...value])}`;
	if (value instanceof Map) return `Map ${described([...value])}`;
	if (typeof value !== "object") return `${typeof value} ${value}`;
	if ("tag" in value) return `tag ${value.tag} ${described(value.value)}`;
	const fields = Object.entries(value).map(([key, field]) => `${key}: ${described(field)}`);
	return `{${fields.join(", ")}}`;
}

async function describe(ctx, names) {
	const seen = {};
	for (const name of names) {
		seen[name] = described(await ctx.step(name, fails({ effects: [] }, name, new CriticalError("not recorded"))));
	}
	return seen;
}

const carry = (ctx) =>
	ctx.loop({
		name: "carry",
		state: null,
		run: async (inner, state) => {
			const { body } = await inner.queue.next("next");
			return body === "end" ? Loop.break(state) : Loop.continue(state);
		},
	});

const JAVASCRIPT = {
	"undefined within": [undefined, { a: undefined }],
	"2 ** 53": 2 ** 53,
	"bigint 5": 5n,
	"bigint -(2 ** 64)": -(2n ** 64n),
	"bigint 2 ** 200": 2n ** 200n,
	"-0": -0,
	date: new Date(-1),
	"no date": new Date(Number.NaN),
	bytes: new Uint8Array([0, 255]),
	floats: new Float32Array([0.5, -2]),
	shorts: new Int16Array([-1, 256]),
	set: new Set([1, "a"]),
	map: new Map([[[1, 2], "list"], [null, 1n]]),
	"empty map": new Map(),
	error: new TypeError("wrong"),
	"half a character": "\ud83d",
	nested: { a: [{ b: [new Set([new Map([[1, new Date(0)]])])] }] },
};

async function give(ctx, _, world) {
	const seen = {};
	for (const [name, value] of Object.entries(JAVASCRIPT)) seen[name] = await ctx.step(name, did(world, name, value));
	await ctx.queue.next("next");
	return Object.keys(seen).length;
}

export const WORKFLOWS = {
	order,
	retry,
	sleep,
	loop: counting(25),
	loopdone: counting(null),
	join,
	race,
	rollback,
	migrate,
	values,
	tried,
	errmeta,
	batch,
	listen,
	empty,
	exhausted,
	recovered,
	twice,
	names,
	fan,
	partial,
	"deadline met": deadline,
	"deadline missed": deadline,
	lost,
	block,
	attempted,
	jobs,
	upgraded,
	saga,
	stubborn,
	hidden,
	rewound,
	joined,
	compensated,
	within,
	describe,
	carry,
	give,
	nested,
	aliased,
	once: once(0),
	"once again": once(3),
	critical,
	versioned,
	late,
	unreadable,
};
