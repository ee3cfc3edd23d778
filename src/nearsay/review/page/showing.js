// Draws one example; names come from the data of others, so they are only ever set as text.

const find = (id) => document.getElementById(id);
const LARGEST_PIXEL = 40; // how far a small picture is blown up, at most
const SMALL = 200; // pixels: below, they are shown as they are

export function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

export function showExample(state, example, { nameOf, standingOf, preloaded }) {
  find("given").textContent = nameOf(example.given);
  find("suggested").textContent = example.suggested >= 0 ? nameOf(example.suggested) : "none";
  find("accept").disabled = example.suggested < 0;
  find("accept").classList.toggle("same", example.suggested === example.given);
  find("probability").textContent = example.probability === null ? "" : `· ${percent(example.probability)}`;
  find("path").textContent = example.path || "";
  find("path").title = example.path || "";
  showPicture(state, example, preloaded);
  showNeighbors(state, example, nameOf, standingOf);
  showDetails(example);
}

function showPicture(state, example, preloaded) {
  const old = find("picture");
  const image = preloaded && preloaded.isConnected === false ? preloaded : new Image();
  image.id = "picture";
  image.alt = `Example ${example.index}`;
  image.onload = () => fit(image);
  image.onerror = () => explain(example, image);
  find("no-picture").hidden = state.has_pictures;
  image.hidden = !state.has_pictures;
  if (state.has_pictures) {
    if (!image.src) image.src = `picture/large/${example.index}`;
    if (image.complete) image.naturalWidth ? fit(image) : explain(example, image);
  } else {
    const why = state.notes.length ? "" : ": this example is a row of features"; // else the note says it
    find("no-picture").textContent = `No picture${why}. Its neighbors speak for it.`;
  }
  old.replaceWith(image);
}

function fit(image) {
  const longest = Math.max(image.naturalWidth, image.naturalHeight);
  image.classList.toggle("crisp", longest < SMALL);
  image.style.maxWidth = `${image.naturalWidth * LARGEST_PIXEL}px`;
  image.style.maxHeight = `${image.naturalHeight * LARGEST_PIXEL}px`;
}

async function explain(example, image) {
  image.hidden = true;
  const line = find("no-picture");
  line.textContent = "This picture cannot be read.";
  line.hidden = false;
  try {
    const answer = await fetch(`picture/large/${example.index}`);
    const reason = await answer.text();
    if (image.isConnected && !answer.ok) line.textContent = `This picture cannot be read: ${reason.trim()}`;
  } catch { /* the line says enough */ }
}

function showNeighbors(state, example, nameOf, standingOf) {
  const votes = new Map();
  const items = example.neighbors.map((near) => {
    const standing = standingOf(near.index);
    const isCorrected = ["accept", "other", "drop"].includes(standing.decision);
    const label = isCorrected ? standing.label : near.label;
    votes.set(label, (votes.get(label) || 0) + 1);
    const item = element("li", "", kind(label, example));
    if (state.has_pictures) {
      const image = new Image();
      image.alt = "";
      image.onload = () => image.classList.toggle("crisp", Math.max(image.naturalWidth, image.naturalHeight) < 100);
      image.onerror = () => image.replaceWith(element("span", "unreadable", "missing"));
      image.src = `picture/small/${near.index}`;
      item.append(image);
    }
    item.append(element("span", nameOf(label), "name"), element("span", near.similarity.toFixed(2), "similarity"));
    item.title = `Example ${near.index}, ${isCorrected ? "corrected to" : "labeled"} ${nameOf(label)}, similarity ${near.similarity.toFixed(2)}`;
    return item;
  });
  find("neighbors").replaceChildren(...items);
  find("neighbors").classList.toggle("plain", !state.has_pictures);
  const order = [...votes].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const total = example.neighbors.length;
  const line = find("votes");
  line.replaceChildren();
  order.slice(0, 4).forEach(([label, num], at) => {
    line.append(at ? ", " : "", element("b", String(num)), " × ", element("bdi", nameOf(label), `name ${kind(label, example)}`));
  });
  if (order.length > 4) line.append(`, ${order.length - 4} more`);
  line.append(total ? ` of ${total}` : "No neighbors are known.");
  find("shares").replaceChildren(...order.map(([label, num]) => {
    const share = element("span", "", kind(label, example));
    share.style.flexGrow = String(num);
    return share;
  }));
}

function kind(label, example) {
  if (label === example.given) return "given";
  return label === example.suggested ? "suggested" : "else";
}

const EXPLAINED = { ood_score: "ood score (low: like nothing else)" };

function showDetails(example) {
  const rows = [];
  if (example.status !== "ok") rows.push(["status", example.status]);
  for (const [name, cell] of Object.entries(example.details)) rows.push([EXPLAINED[name] || name.replaceAll("_", " "), cell]);
  find("details").replaceChildren(...rows.flatMap(([name, cell]) => [element("dt", name), element("dd", cell, "name")]));
}

export function showNames(box, pairs, nameOf, example, choose) {
  box.replaceChildren(...pairs.map(([digit, label]) => {
    const button = element("button", "", `choice ${kind(label, example)}`);
    button.type = "button";
    if (nameOf(label) !== digit) button.append(element("span", nameOf(label), "name"), " ");
    button.append(element("kbd", digit));
    button.title = nameOf(label);
    button.addEventListener("click", () => choose(label));
    return button;
  }));
}

function percent(share) {
  const number = Math.round(100 * share);
  if (number === 100 && share < 1) return ">99 %";
  return number === 0 && share > 0 ? "<1 %" : `${number} %`;
}
