// Shows what every rank is doing. ComfyUI's side panel and the page of rank 0 use the same view; importing it does nothing.
// Text from the ranks goes into the page as text and never as markup.

const EVERY_MS = 1000;
const PATIENCE_MS = 8000;
const LOG_LINES = 200;

/** A view inside `root`. `getJson(path, signal)` fetches "status" or "logs?…" from rank 0 and rejects when there is no answer. */
export class RanksView {
    constructor(root, getJson) {
        this.root = root;
        this.getJson = getJson;
        this.cards = [];
        this.timer = null;
        this.running = false;
        this.request = null;
        this.lastSeen = null;
        this.onVisibility = () => this.wake();
        this.build();
    }

    /** Look once a second from now on, except while the page is hidden. */
    start() {
        if (this.running) {
            return;
        }
        this.running = true;
        document.addEventListener("visibilitychange", this.onVisibility);
        this.wake();
    }

    stop() {
        this.running = false;
        document.removeEventListener("visibilitychange", this.onVisibility);
        this.sleep();
    }

    sleep() {
        clearTimeout(this.timer);
        this.timer = null;
        this.request?.abort();
        this.request = null;
    }

    wake() {
        this.sleep();
        if (this.running && !document.hidden) {
            this.poll();
        }
    }

    async poll() {
        const request = new AbortController();
        this.request = request;
        const limit = setTimeout(() => request.abort(), PATIENCE_MS);
        const status = await this.getJson("status", request.signal).catch(() => null);
        clearTimeout(limit);
        // An answer that comes after the view went to sleep belongs to nobody.
        if (this.request !== request) {
            return;
        }
        this.timer = setTimeout(() => this.wake(), EVERY_MS);
        if (status === null) {
            this.showLost();
        } else {
            this.show(status);
            this.cards.forEach((card) => card.refreshLog());
        }
    }

    build() {
        this.root.classList.add("phase-parallel-ranks");
        const style = element("link");
        style.rel = "stylesheet";
        style.href = new URL("./ranks.css", import.meta.url).href;
        this.state = element("p", "pp-state", "Asking rank 0 …");
        this.state.setAttribute("role", "status");
        this.plan = element("p", "pp-plan");
        this.list = element("div", "pp-cards");
        this.root.replaceChildren(style, element("h2", "", "Ranks"), this.state, this.plan, this.list);
    }

    show(status) {
        this.lastSeen = new Date();
        this.root.classList.remove("pp-old");
        this.state.classList.remove("pp-lost");
        setText(this.state, summary(status));
        setText(this.plan, status.plan ? `Plan ${status.plan}` : "No model has been loaded yet.");
        if (this.cards.length !== status.ranks.length) {
            this.cards = status.ranks.map((_, rank) => new Card(rank, this.getJson));
            this.list.replaceChildren(...this.cards.map((card) => card.root));
        }
        status.ranks.forEach((record, rank) => this.cards[rank].show(record, status));
    }

    showLost() {
        this.root.classList.add("pp-old");
        this.state.classList.add("pp-lost");
        const seen = this.lastSeen ? ` What you see is of ${this.lastSeen.toLocaleTimeString()}.` : "";
        setText(this.state, `Rank 0 does not answer.${seen}`);
    }
}

/** One rank. Its elements are made once and only their text changes, so focus and an open log stay. */
class Card {
    constructor(rank, getJson) {
        this.rank = rank;
        this.getJson = getJson;
        this.root = element("article", "pp-card");
        this.root.setAttribute("aria-label", `Rank ${rank}`);
        this.device = element("span", "pp-device");
        const head = element("div", "pp-head");
        head.append(element("h3", "", `Rank ${rank}`), this.device);
        this.bar = element("progress");
        this.bar.setAttribute("aria-label", `Progress of rank ${rank}`);
        this.rows = element("dl");
        this.values = new Map();
        this.error = element("p", "pp-error");
        this.log = element("pre");
        this.log.tabIndex = 0;
        this.log.setAttribute("aria-label", `Log of rank ${rank}`);
        this.logAsked = false;
        this.logBox = element("details");
        this.more = element("dl");
        this.logBox.append(element("summary", "", "Details and log"), this.more, this.log);
        this.logBox.addEventListener("toggle", () => this.refreshLog());
        this.root.append(head, this.bar, this.rows, this.error, this.logBox);
    }

    show(record, status) {
        if (record === null) {
            setText(this.device, "not started; see its log");
            this.bar.hidden = true;
            this.rows.replaceChildren();
            this.more.replaceChildren();
            this.values.clear();
            setText(this.error, "");
            return;
        }
        setText(this.device, record.device_name || record.device);
        this.bar.hidden = record.phase === "idle";
        setBar(this.bar, record);
        for (const [name, text] of describe(record, status.silent.includes(this.rank))) {
            this.setRow(this.rows, name, text);
        }
        for (const [name, text] of describeMore(record)) {
            this.setRow(this.more, name, text);
        }
        setText(this.error, record.error ? `Last error, ${moment(record.error_at)}: ${record.error}` : "");
    }

    setRow(list, name, text) {
        if (!this.values.has(name)) {
            const value = element("dd");
            value.dataset.field = name;
            this.values.set(name, value);
            list.append(element("dt", "", name), value);
        }
        setText(this.values.get(name), text);
    }

    /** Fetch the end of the log if it is open; one request at a time. */
    async refreshLog() {
        if (!this.logBox.open || this.logAsked) {
            return;
        }
        this.logAsked = true;
        const limit = AbortSignal.timeout(PATIENCE_MS);
        const text = await this.getJson(`logs?rank=${this.rank}&lines=${LOG_LINES}`, limit).then(
            ({ lines }) => lines.map((line) => `[rank ${this.rank}] ${line}`).join("\n") || "nothing yet",
            (error) => error.message,
        );
        this.logAsked = false;
        const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
        setText(this.log, text);
        if (atEnd) {
            this.log.scrollTop = this.log.scrollHeight;
        }
    }
}

/** What `getJson` is on a page that reaches rank 0 through `fetcher(path, options)`. */
export function jsonGetter(fetcher) {
    return async (path, signal) => {
        const answer = await fetcher(path, { signal, cache: "no-store" });
        const content = await answer.json();
        if (!answer.ok) {
            throw new Error(content.error ?? `rank 0 answered ${answer.status}`);
        }
        return content;
    };
}

/** [name, text] of each row of a card. */
function describe(record, silent) {
    return [
        ["Phase", phaseWords(record) + (silent ? " (silent)" : "")],
        ["Place", placeWords(record)],
        ["Memory", memoryWords(record.memory)],
        ["Last text", lastRun(record.tokens, "token", record.tokens_per_s && `${record.tokens_per_s.toFixed(1)} tokens/s`, record.text_at)],
        ["Last picture", lastRun(record.steps, "step", record.s_per_step && `${record.s_per_step.toFixed(2)} s/step`, record.picture_at)],
    ];
}

/** Of each row of its details. */
function describeMore(record) {
    return [
        ["Text by", record.text_path || "–"],
        ["Process", `${record.pid} on ${record.host}, ${gb(record.memory.resident_set)} GB, peak ${gb(record.memory.resident_peak)} GB`],
    ];
}

function phaseWords(record) {
    return record.total ? `${record.phase} ${record.done}/${record.total}` : record.phase;
}

function placeWords(record) {
    if (!("shard" in record.place)) {
        return "none yet";
    }
    const words = [`shard ${record.place.shard}, replica ${record.place.replica}`];
    for (const [phase, groups] of Object.entries(record.groups)) {
        const parts = Object.entries(groups).map(([kind, [place, size]]) => `${kind} ${place} of ${size}`);
        if (parts.length) {
            words.push(`${phase} ${parts.join(" × ")}`);
        }
    }
    return words.join("; ");
}

function memoryWords(memory) {
    if ("device_total" in memory) {
        return `${gb(memory.device_allocated)} of ${gb(memory.device_total)} GB, peak ${gb(memory.device_peak)} GB, ${gb(memory.device_free)} GB free`;
    }
    return `${gb(memory.resident_set)} of ${gb(memory.host_total)} GB, peak ${gb(memory.resident_peak)} GB`;
}

function summary(status) {
    const missing = status.ranks.filter((record) => record === null).length;
    const busy = status.ranks.filter((record) => record !== null && record.phase !== "idle").length;
    const words = [`${status.world_size} rank${status.world_size === 1 ? "" : "s"}`, busy ? `${busy} at work` : "idle"];
    if (missing) {
        words.push(`${missing} not started`);
    }
    if (status.silent.length) {
        words.push(`silent: ${status.silent.join(", ")}`);
    }
    return words.join(", ");
}

function setBar(bar, record) {
    if (record.total) {
        bar.max = record.total;
        bar.value = record.done;
    } else {
        bar.removeAttribute("value"); // at work, nobody knows how far
    }
}

/** `50 steps, 0.51 s/step, 14:02:11`; a text of one token has no speed. */
function lastRun(count, unit, speed, seconds) {
    if (!count) {
        return "none";
    }
    return [`${count} ${unit}${count === 1 ? "" : "s"}`, speed, moment(seconds)].filter(Boolean).join(", ");
}

/** Local time, with the day where it is another one. */
function moment(seconds) {
    const then = new Date(seconds * 1000);
    return then.toDateString() === new Date().toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
}

function gb(bytes) {
    return (bytes / 1e9).toFixed(1);
}

function element(name, classes = "", text = "") {
    const made = document.createElement(name);
    if (classes) {
        made.className = classes;
    }
    made.textContent = text;
    return made;
}

/** Only where it differs: a screen reader says nothing twice, and a selection stays. */
function setText(target, text) {
    if (target.textContent !== text) {
        target.textContent = text;
    }
}
