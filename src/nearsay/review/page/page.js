// The page: shows one example at a time, and turns keys and clicks into decisions.

import { ask, Lost, newKey, pending } from "./contact.js";
import { finder } from "./finder.js";
import { choices, pace, Queue } from "./queue.js";
import { element, showExample, showNames } from "./showing.js";

const LOOK_AHEAD = 4;
const LISTEN_EVERY = 3000; // milliseconds
const RETRY_AFTER = 2000;
const NOTICED = 400; // milliseconds after which a key seems to have done nothing
const VERBS = { accept: "Accepted", keep: "Kept", other: "Changed to", drop: "Dropped the label" };
const PLACE = `place ${location.pathname}`;

const find = (id) => document.getElementById(id);
const filters = find("filters");
const times = [];
const known = new Map(); // examples by number, as promises
const pictures = new Map(); // images that are being loaded ahead
let state, queue, example = null;
let sending = pending.read();
let retry = 0;

start();

async function start() {
  try {
    const answer = await ask("state");
    if (answer.status !== 200) throw new Lost(answer.value.error);
    state = answer.value;
  } catch (error) {
    find("waiting").textContent = "No answer from nearsay review; trying again …";
    setTimeout(start, RETRY_AFTER);
    return;
  }
  queue = new Queue(state);
  find("waiting").textContent = "Loading …"; // until the first example is there
  document.title = `${state.run} – nearsay review`;
  find("run").textContent = state.run;
  find("find").parentElement.hidden = state.classes.length <= 10; // each has a key of its own
  for (const note of state.notes) find("notes").append(element("p", note));
  for (const name of ["given", "suggested"]) {
    state.classes.forEach((label, number) => filters.elements[name].append(new Option(label, number)));
  }
  if (!state.is_issue.some(Boolean)) {
    filters.elements.which.options[1].defaultSelected = true; // for the reset of the filters
    filters.elements.which.value = "all";
  }
  filters.elements.which.options[2].hidden = !state.is_unreadable.some(Boolean);
  const place = remembered();
  for (const [name, value] of Object.entries(place.filter || {})) {
    if (filters.elements[name]) filters.elements[name].value = value;
  }
  select(place.index);
  listen();
  if (sending) deliver();
}

function filter() {
  return Object.fromEntries(new FormData(filters));
}

function remembered() {
  try { return JSON.parse(sessionStorage.getItem(PLACE)) || {}; } catch { return {}; }
}

function select(index) {
  const isThere = queue.select(filter(), index);
  if (index !== undefined && !isThere) queue.place = 0;
  show();
}

// Showing

async function show() {
  const row = queue.current();
  sessionStorage.setItem(PLACE, JSON.stringify({ filter: filter(), index: row && row.index }));
  showCounts();
  find("end").hidden = Boolean(row);
  if (!row) example = null;
  showDesk(row);
  if (!row) {
    showEnd();
    return;
  }
  try {
    const value = await fetchExample(row.index);
    if (row !== queue.current()) return; // went on meanwhile
    example = value;
    showDesk(row);
    found.close();
    showExample(state, example, { nameOf, standingOf: (index) => queue.standing(index), preloaded: pictures.get(row.index) });
    showStanding();
    showPlace();
    showNames(find("choices"), choices(state.classes, example), nameOf, example, (label) => decide("other", label));
    lookAhead();
  } catch (error) {
    if (!(error instanceof Lost)) throw error;
    lose();
    setTimeout(show, RETRY_AFTER);
  }
}

function showDesk(row) {
  find("desk").hidden = !row || !example;
  find("waiting").hidden = !row || Boolean(example);
}

function fetchExample(index) {
  if (!known.has(index)) {
    const promise = ask(`example/${index}`).then((answer) => {
      if (answer.status !== 200) throw new Lost(answer.value.error);
      return answer.value;
    });
    promise.catch(() => known.delete(index));
    known.set(index, promise);
  }
  return known.get(index);
}

function lookAhead() {
  const rows = queue.ahead(LOOK_AHEAD);
  rows.forEach((row, distance) => {
    if (state.has_pictures) load(row.index);
    fetchExample(row.index).then((next) => {
      if (!state.has_pictures || distance > 1) return; // a decision or two of evidence is enough
      for (const near of next.neighbors) new Image().src = `picture/small/${near.index}`;
    }, () => {});
  });
  const wanted = new Set([...rows.map((row) => row.index), example.index]);
  for (const index of [...known.keys()]) if (!wanted.has(index) && known.size > 60) known.delete(index);
  for (const index of [...pictures.keys()]) if (!wanted.has(index)) pictures.delete(index);
}

function load(index) {
  if (pictures.has(index)) return;
  const image = new Image();
  image.src = `picture/large/${index}`;
  pictures.set(index, image);
}

function nameOf(label) {
  return label >= 0 ? state.classes[label] : "no label";
}

function showPlace() {
  const { place, list } = queue;
  const score = example.score === null ? "no score" : `score ${example.score.toFixed(3)}`;
  const at = `${(place + 1).toLocaleString()} of ${list.length.toLocaleString()}`;
  find("place").textContent = `${at} · example ${example.index} · ${score}`;
  find("back").disabled = place === 0;
  find("forward").disabled = false;
}

function showStanding() {
  const standing = queue.standing(example.index);
  const line = find("standing");
  line.hidden = !standing.decision;
  const label = standing.decision === "drop" ? "" : nameOf(standing.label);
  line.replaceChildren();
  if (standing.decision === "skip") line.append("Skipped before");
  else if (standing.decision) line.append(`${VERBS[standing.decision]} `, element("bdi", label, "name"), " before");
  find("keep").setAttribute("aria-pressed", String(standing.decision === "keep"));
  find("accept").setAttribute("aria-pressed", String(standing.decision === "accept"));
}

function showCounts() {
  const { done, left, total } = queue.counts();
  find("bar").max = total || 1;
  find("bar").value = done;
  find("done").textContent = done.toLocaleString();
  find("left").textContent = left.toLocaleString();
  const rate = pace(times);
  find("rate").textContent = rate === null ? "–" : rate.toLocaleString();
  const matching = queue.list.length;
  find("matches").textContent = `${matching.toLocaleString()} ${matching === 1 ? "label matches" : "labels match"}`;
  find("undo").disabled = find("end-undo").disabled = !queue.session.length;
}

function showEnd() {
  const { done, left, skipped, total } = queue.counts();
  const isDone = total > 0 && left === 0 && filter().decision === "undecided";
  find("see-skipped").hidden = !skipped;
  find("see-decided").hidden = !done;
  if (!total) {
    find("end-title").textContent = "No label matches";
    find("end-text").textContent = "Change the filters, or show all labels.";
    return;
  }
  find("end-title").textContent = isDone ? "All done here" : "Nothing more here";
  const parts = [`${done.toLocaleString()} of ${total.toLocaleString()} labels are decided, ${skipped.toLocaleString()} skipped.`];
  if (isDone) parts.push(`Ctrl-C in the terminal ends the review; then nearsay clean makes labels of ${state.corrections} that can be trained on.`);
  find("end-text").textContent = parts.join(" ");
}

function say(...parts) {
  find("said").replaceChildren(...parts);
}

// Deciding

async function decide(decision, label) {
  if (sending || !example || (decision === "accept" && example.suggested < 0)) return;
  if (decision === "keep" && example.given < 0) decision = "skip";
  await send({ index: example.index, decision, label });
}

async function undo() {
  if (sending || !queue.session.length) return;
  await send({ index: queue.session[queue.session.length - 1], decision: "undo" });
}

async function send(asked) {
  sending = { ...asked, key: newKey(), seen: queue.standing(asked.index).revision };
  pending.write(sending);
  await deliver();
}

async function deliver() {
  clearTimeout(retry);
  const slow = setTimeout(() => say("Saving …"), NOTICED);
  let answer;
  try {
    answer = await ask("decide", sending);
  } catch (error) {
    lose();
    retry = setTimeout(deliver, RETRY_AFTER);
    return;
  } finally {
    clearTimeout(slow);
    say("");
  }
  const asked = sending;
  if (answer.status === 200) {
    settle();
    queue.learn({ standings: [answer.value], version: 0 });
    accepted(asked, answer.value);
  } else if (answer.status === 409) {
    settle();
    queue.learn({ standings: [answer.value.standing] });
    warn(`Another window has decided about example ${asked.index} meanwhile: it is shown as it stands now. Decide again to replace that.`);
    show();
  } else if (answer.status === 400) {
    settle();
    warn(answer.value.error);
  } else {
    alarm(`Not saved: ${answer.value.error}. The decision on example ${asked.index} is kept here.`, true);
  }
}

function settle() {
  sending = null;
  pending.write(null);
  alarm("");
}

function accepted(asked, standing) {
  if (asked.decision === "undo") {
    const last = queue.session.lastIndexOf(asked.index);
    if (last >= 0) queue.session.splice(last, 1);
    times.pop();
    say(`Undone: example ${asked.index}`);
    const row = queue.byIndex.get(asked.index);
    if (!queue.goTo(asked.index) && row) queue.list.splice(queue.place, 0, row); // the filter hides it
  } else {
    if (asked.decision !== "skip" || standing.decision === "skip") queue.session.push(asked.index);
    if (asked.decision !== "skip") times.push(performance.now());
    const decision = asked.decision === "skip" ? "skip" : standing.decision;
    if (decision === "skip") say(`Skipped example ${asked.index}`);
    else if (decision === "drop") say(`Dropped the label of example ${asked.index}`);
    else say(`${VERBS[decision]} `, element("bdi", nameOf(standing.label), "name"), ` for example ${asked.index}`);
    if (queue.current() && asked.index === queue.current().index) queue.advance(filter());
  }
  show();
}

// Contact

function alarm(text, canSend = false) {
  const box = find("alert");
  box.hidden = !text;
  box.querySelector("p").textContent = text;
  box.querySelector("button").hidden = !canSend;
  document.body.classList.toggle("lost", Boolean(text) && canSend);
}

// An alarm that ends by itself.
function warn(text) {
  alarm(text);
  setTimeout(() => { if (find("alert").querySelector("p").textContent === text) alarm(""); }, 6000);
}

function lose() {
  const kept = sending ? ` The decision on example ${sending.index} is kept here and sent as soon as there is an answer.` : "";
  alarm(`No answer from nearsay review: is it still running in the terminal?${kept}`, Boolean(sending));
}

async function listen() {
  try {
    const answer = await ask(`changes/${queue.version}`);
    if (answer.status === 200) {
      if (!sending && find("alert").textContent.startsWith("No answer")) alarm("");
      const news = queue.learn(answer.value);
      if (news.length) {
        showCounts();
        if (example && news.includes(example.index) && !sending) show();
      }
    } else if (!sending) alarm("The review was started again at another address; open the one that it has printed.");
  } catch (error) {
    if (!sending) lose();
  }
  setTimeout(listen, LISTEN_EVERY);
}

// Keys and clicks

const found = finder(find("find"), find("found"), () => (state ? state.classes : []), (label) => decide("other", label));

const DOING = {
  a: () => decide("accept"),
  k: () => decide("keep"),
  d: () => decide("drop"),
  s: () => decide("skip"),
  u: undo,
  o: () => find("find").focus(),
  f: () => toggleFilters(),
  "?": () => find("help").showModal(),
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && isTyping) event.target.blur();
  if (!queue || isTyping || find("help").open || event.altKey || event.metaKey) return;
  if (event.ctrlKey) {
    if (event.key === "z") { event.preventDefault(); undo(); }
    return;
  }
  const isArrow = event.key.startsWith("Arrow");
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (event.repeat && !isArrow) return; // a key that is held down decides once
  if (Object.hasOwn(DOING, key)) {
    event.preventDefault();
    DOING[key]();
  } else if (/^[0-9]$/.test(key) && example) {
    const chosen = choices(state.classes, example).find(([digit]) => digit === key);
    if (chosen) decide("other", chosen[1]);
  }
});

function step(by) {
  if (sending || (by > 0 && !queue.current())) return;
  queue.step(by);
  show();
}

function toggleFilters() {
  filters.hidden = !filters.hidden;
  find("open-filters").setAttribute("aria-expanded", String(!filters.hidden));
  if (!filters.hidden) filters.elements.which.focus();
}

function see(which, decision) {
  if (which) {
    for (const name of ["given", "suggested"]) filters.elements[name].value = "";
    for (const name of ["from", "to"]) filters.elements[name].value = filters.elements[name].defaultValue;
    filters.elements.which.value = which;
  }
  filters.elements.decision.value = decision;
  select();
}

for (const name of ["accept", "keep", "drop", "skip"]) find(name).addEventListener("click", () => decide(name));
for (const id of ["undo", "end-undo"]) find(id).addEventListener("click", undo);
find("back").addEventListener("click", () => step(-1));
find("forward").addEventListener("click", () => step(1));
find("open-filters").addEventListener("click", toggleFilters);
find("open-help").addEventListener("click", () => find("help").showModal());
find("see-skipped").addEventListener("click", () => see("", "skipped"));
find("see-decided").addEventListener("click", () => see("", "decided"));
find("see-all").addEventListener("click", () => see("all", "all"));
find("alert").querySelector("button").addEventListener("click", deliver);
filters.addEventListener("input", () => { if (filters.reportValidity()) select(example ? example.index : undefined); });
filters.addEventListener("reset", () => setTimeout(() => queue && select()));
filters.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("beforeunload", (event) => { if (sending) event.preventDefault(); });
