// Which examples to look at, in which order, and how each of them stands.

const COUNTING = ["accept", "keep", "other", "drop"];

export class Queue {
  constructor(state) {
    this.rows = state.index.map((index, place) => ({
      index,
      given: state.given[place],
      suggested: state.suggested[place],
      score: state.score[place],
      isIssue: state.is_issue[place],
      isUnreadable: state.is_unreadable[place],
    }));
    this.byIndex = new Map(this.rows.map((row) => [row.index, row]));
    this.standings = new Map();
    this.version = state.version;
    this.session = state.session;
    this.list = [];
    this.place = 0;
    this.learn(state);
  }

  // Take in how examples stand now; returns the numbers of those that are news.
  learn(answer) {
    this.version = Math.max(this.version, answer.version || 0);
    const news = answer.standings.filter((each) => each.revision > this.standing(each.index).revision);
    for (const each of news) this.standings.set(each.index, each);
    return news.map((each) => each.index);
  }

  standing(index) {
    const row = this.byIndex.get(index);
    return this.standings.get(index) || { index, decision: "", label: row ? row.given : -1, revision: 0 };
  }

  isDecided(row) {
    return COUNTING.includes(this.standing(row.index).decision);
  }

  isOpen(row) {
    return this.standing(row.index).decision === "";
  }

  // The rows of a filter; the list then stays as it is while they are decided, so that one can go back.
  select(filter, current) {
    this.base = this.rows.filter((row) => matches(row, filter));
    this.list = this.base.filter((row) => {
      if (filter.decision === "decided") return this.isDecided(row);
      if (filter.decision === "skipped") return this.standing(row.index).decision === "skip";
      return filter.decision === "all" || this.isOpen(row);
    });
    const place = this.list.findIndex((row) => row.index === current);
    this.place = Math.max(place, 0);
    return place >= 0;
  }

  current() {
    return this.list[this.place];
  }

  // The next rows, those to be decided first; for looking ahead.
  ahead(num) {
    const found = [];
    for (let place = this.place + 1; place < this.list.length && found.length < num; place += 1) {
      if (this.isOpen(this.list[place])) found.push(this.list[place]);
    }
    return found;
  }

  // On to the next row that is open, or past the end; with a list of decided ones, to the next row.
  advance(filter) {
    const wantsOpen = filter.decision === "undecided" || filter.decision === "all";
    let place = this.place + 1;
    while (wantsOpen && place < this.list.length && !this.isOpen(this.list[place])) place += 1;
    if (wantsOpen && place >= this.list.length) {
      const missed = this.list.findIndex((row) => this.isOpen(row)); // those that were passed by
      place = missed < 0 ? this.list.length : missed;
    }
    this.place = place;
  }

  step(by) {
    this.place = Math.min(Math.max(this.place + by, 0), this.list.length);
  }

  goTo(index) {
    const place = this.list.findIndex((row) => row.index === index);
    if (place >= 0) this.place = place;
    return place >= 0;
  }

  counts() {
    const done = this.base.filter((row) => this.isDecided(row)).length;
    const skipped = this.base.filter((row) => this.standing(row.index).decision === "skip").length;
    return { done, skipped, left: this.base.length - done - skipped, total: this.base.length };
  }
}

function matches(row, filter) {
  if (filter.which === "suspicious" && !row.isIssue) return false;
  if (filter.which === "unreadable" && !row.isUnreadable) return false;
  if (filter.given !== "" && row.given !== Number(filter.given)) return false;
  if (filter.suggested !== "" && row.suggested !== Number(filter.suggested)) return false;
  if (row.score === null) return Number(filter.from) <= 0 && Number(filter.to) >= 1;
  return row.score >= Number(filter.from) && row.score <= Number(filter.to);
}

// Which digit chooses which class: its own name where classes are digits, else in order, for at most ten classes;
// with more, the classes of the neighbors that are not offered already, the nearest first.
export function choices(classes, example) {
  if (classes.every((name) => /^[0-9]$/.test(name))) return classes.map((name, number) => [name, number]);
  if (classes.length <= 10) return classes.map((_, number) => [String((number + 1) % 10), number]);
  const weights = new Map();
  for (const { label, similarity } of example.neighbors) {
    if (label >= 0 && label !== example.given && label !== example.suggested) {
      weights.set(label, (weights.get(label) || 0) + similarity);
    }
  }
  const order = [...weights.keys()].sort((a, b) => weights.get(b) - weights.get(a) || a - b);
  return order.slice(0, 9).map((number, place) => [String(place + 1), number]);
}

// Decisions an hour, from the times at which they were made; a pause counts as a minute at most.
export function pace(times) {
  if (times.length < 5) return null;
  let spent = 0;
  for (let place = 1; place < times.length; place += 1) spent += Math.min(times[place] - times[place - 1], 60000);
  return spent ? Math.round(((times.length - 1) * 3600000) / spent) : null;
}
