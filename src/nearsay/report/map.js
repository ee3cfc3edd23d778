"use strict";
(() => {
  const data = JSON.parse(document.getElementById("atlas-data")?.textContent ?? "null");
  const figure = document.getElementById("atlas");
  if (!data || !figure) return;
  const find = (name) => document.getElementById(`atlas-${name}`);
  const canvas = find("canvas"), tip = find("tip"), legend = find("legend");
  const by = find("by"), only = find("only"), chooser = find("class");
  const total = data.x.length, hues = 10, mostNamed = 20, margin = 24;
  const sheets = data.sheets.map((address) => Object.assign(new Image(), { src: address }));
  let active = -1, colors = [], ink = "", paper = "", quiet = "";

  const nameOf = (label) => (label < 0 ? "no label" : data.classes[label]);
  const labelOf = (point) => (by.value === "seems" ? data.seems : data.given)[point];
  const colorOf = (label) => (label < 0 ? quiet : colors[label % hues]);
  const isChosen = (point) => {
    const wanted = Number(chooser.value);
    return chooser.value === "" || data.given[point] === wanted || data.seems[point] === wanted;
  };
  const isShown = (point) => isChosen(point) && (data.issue[point] || !only.checked);
  const place = (point) => {
    const { width, height } = size();
    const scale = Math.min((width - 2 * margin) / extent.x, (height - 2 * margin) / extent.y);
    const left = (width - scale * extent.x) / 2, top = (height - scale * extent.y) / 2;
    return [left + scale * data.x[point], height - top - scale * data.y[point]];
  };
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 1e-6);
  const extent = { x: largest(data.x), y: largest(data.y) };
  const size = () => ({ width: canvas.clientWidth, height: canvas.clientHeight });

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    colors = Array.from({ length: hues }, (_, number) => value(`--hue-${number + 1}`));
    [ink, paper, quiet] = [value("--ink"), value("--paper"), value("--quiet")];
  }

  function mark(pen, point, isActive) {
    const [x, y] = place(point);
    pen.fillStyle = colorOf(labelOf(point));
    pen.beginPath();
    if (data.issue[point]) {
      const reach = isActive ? 9 : 5.5;
      pen.moveTo(x, y - reach); pen.lineTo(x + reach, y); pen.lineTo(x, y + reach); pen.lineTo(x - reach, y);
      pen.closePath();
      pen.globalAlpha = 1;
      pen.strokeStyle = ink;
      pen.lineWidth = isActive ? 2.5 : 1.1;
      pen.fill(); pen.stroke();
    } else {
      pen.arc(x, y, isActive ? 7 : 2.6, 0, 7);
      pen.globalAlpha = isActive ? 1 : 0.75;
      pen.fill();
      if (isActive) { pen.strokeStyle = ink; pen.lineWidth = 2.5; pen.stroke(); }
    }
    pen.globalAlpha = 1;
  }

  function middle(values) {
    return values.sort((a, b) => a - b)[values.length >> 1];
  }

  function names(pen) {
    const groups = new Map();
    for (let point = 0; point < total; point++) {
      if (data.issue[point] || !isChosen(point) || labelOf(point) < 0) continue;
      if (!groups.has(labelOf(point))) groups.set(labelOf(point), []);
      groups.get(labelOf(point)).push(place(point));
    }
    const taken = [], ranked = [...groups].sort((a, b) => b[1].length - a[1].length || a[0] - b[0]);
    pen.font = "600 13px system-ui, sans-serif";
    pen.textAlign = "center"; pen.textBaseline = "middle"; pen.lineJoin = "round";
    for (const [label, points] of ranked) {
      const x = middle(points.map((each) => each[0])), y = middle(points.map((each) => each[1]));
      const text = data.classes[label].length > 18 ? `${data.classes[label].slice(0, 17)}…` : data.classes[label];
      const half = pen.measureText(text).width / 2 + 4;
      if (taken.some(([a, b, c]) => Math.abs(a - x) < c + half && Math.abs(b - y) < 18)) continue;
      taken.push([x, y, half]);
      pen.lineWidth = 4; pen.strokeStyle = paper; pen.strokeText(text, x, y);
      pen.fillStyle = ink; pen.fillText(text, x, y);
    }
  }

  function draw() {
    const { width, height } = size(), density = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    const pen = canvas.getContext("2d");
    pen.scale(density, density);
    for (const wanted of [0, 1])
      for (let point = 0; point < total; point++)
        if (data.issue[point] === wanted && isShown(point)) mark(pen, point, false);
    names(pen);
    if (active >= 0) mark(pen, active, true);
  }

  function line(text, kind) {
    const element = document.createElement("p");
    element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  function describe(point) {
    const parts = [], tile = data.tile[point];
    if (tile !== null) {
      const side = data.side, count = data.columns * data.columns, small = document.createElement("canvas");
      small.width = small.height = side;
      const within = tile % count, column = within % data.columns, row = Math.floor(within / data.columns);
      small.getContext("2d").drawImage(
        sheets[Math.floor(tile / count)], column * side, row * side, side, side, 0, 0, side, side);
      parts.push(small);
    }
    parts.push(line(`given: ${nameOf(data.given[point])}`));
    if (data.issue[point]) {
      const sure = data.sure[point] === null ? "" : ` (${(100 * data.sure[point]).toFixed(0)} %)`;
      parts.push(line(`seems: ${nameOf(data.seems[point])}${sure}`));
    }
    const score = data.score[point] === null ? "none" : data.score[point].toFixed(3);
    parts.push(line(`score ${score}${data.issue[point] ? ", suspicious" : ""}`, "quiet"));
    parts.push(line(data.file[point] || `example ${data.index[point]}`, "quiet"));
    return parts;
  }

  function show(point) {
    active = point;
    draw();
    tip.hidden = point < 0;
    if (point < 0) return;
    tip.replaceChildren(...describe(point));
    const [x, y] = place(point), { width, height } = size();
    const left = x + 14 + tip.offsetWidth > width ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.min(Math.max(4, left), Math.max(4, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.min(Math.max(4, y - tip.offsetHeight / 2), Math.max(4, height - tip.offsetHeight - 4))}px`;
  }

  function nearest(x, y, reach) {
    let best = -1, least = reach * reach;
    for (let point = 0; point < total; point++) {
      if (!isShown(point)) continue;
      const [a, b] = place(point), distance = (a - x) ** 2 + (b - y) ** 2 - (data.issue[point] ? 9 : 0);
      if (distance < least) { least = distance; best = point; }
    }
    return best;
  }

  function under(event, reach) {
    const box = canvas.getBoundingClientRect();
    return nearest(event.clientX - box.left - canvas.clientLeft, event.clientY - box.top - canvas.clientTop, reach);
  }

  function step(dx, dy) {
    if (active < 0) return nearest(size().width / 2, size().height / 2, Infinity);
    const [x, y] = place(active);
    let best = active, least = Infinity;
    for (let point = 0; point < total; point++) {
      if (point === active || !isShown(point)) continue;
      const [a, b] = place(point), ahead = (a - x) * dx + (b - y) * dy, aside = Math.abs((a - x) * dy + (b - y) * dx);
      if (ahead > 0 && ahead >= aside && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = point; }
    }
    return best;
  }

  function fillLegend() {
    const used = [...new Set(data.given)].filter((label) => label >= 0).sort((a, b) => a - b);
    for (const label of used) {
      const option = document.createElement("option");
      option.value = String(label);
      option.textContent = data.classes[label];
      chooser.append(option);
    }
    legend.hidden = used.length > mostNamed;
    for (const label of legend.hidden ? [] : used) {
      const item = document.createElement("li"), dot = document.createElement("i");
      dot.style.background = `var(--hue-${(label % hues) + 1})`;
      item.append(dot, document.createTextNode(data.classes[label]));
      legend.append(item);
    }
  }

  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  figure.hidden = false;
  readColors();
  fillLegend();
  draw();
  canvas.addEventListener("pointermove", (event) => event.pointerType !== "touch" && show(under(event, 14)));
  canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && show(-1));
  canvas.addEventListener("click", (event) => show(under(event, 28)));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(-1);
    if (!(event.key in arrows)) return;
    event.preventDefault();
    show(step(...arrows[event.key]));
  });
  canvas.addEventListener("blur", () => show(-1));
  for (const each of [by, only, chooser]) each.addEventListener("change", () => show(-1));
  for (const scheme of ["(prefers-color-scheme: dark)", "print"])
    window.matchMedia(scheme).addEventListener("change", () => { readColors(); draw(); });
  new ResizeObserver(() => show(-1)).observe(canvas);
})();
