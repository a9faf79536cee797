"use strict";
// Draws the heat map and the critical path of the chosen algorithm from the numbers in the page.

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const map = document.getElementById("map");
const choice = document.getElementById("algorithm");
const showPath = document.getElementById("show-path");
const readout = document.getElementById("readout");
const dead = new Set(numbers.dead);
const linksOfRank = collectLinks();
let cell = 1;
let chosenRank = -1;
let chosenLink = -1;

function collectLinks() {
  const lists = new Map();
  numbers.source.forEach((rank, link) => {
    if (!lists.has(rank)) lists.set(rank, []);
    lists.get(rank).push(link);
  });
  return lists;
}

function algorithm() {
  return numbers.algorithms[choice ? Number(choice.value) : 0];
}

// Numbers with units.

function show(number, units) {
  const [unit, size] = units.find(([, one]) => number >= one) || units[units.length - 1];
  return `${Number((number / size).toPrecision(3)).toLocaleString("en")} ${unit}`;
}

function showSeconds(seconds) {
  return seconds === 0 ? "0 s" : show(seconds, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]);
}

function showBytes(size) {
  return show(size, [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]]);
}

function nameNode(node) {
  return numbers.names[node];
}

// Colours: of the theme, from idle over the middle to busy.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function channels(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function heatScale() {
  const stops = ["--idle", "--middle", "--busy"].map((name) => channels(colour(name)));
  return Array.from({ length: 101 }, (_, percent) => {
    const place = percent / 50;
    const low = Math.min(Math.floor(place), 1);
    const mixed = stops[low].map((from, index) => from + (stops[low + 1][index] - from) * (place - low));
    return `rgb(${mixed.map(Math.round).join(",")})`;
  });
}

// The map.

function drawMap() {
  const available = map.parentElement.clientWidth;
  cell = Math.max(Math.min(available / numbers.width, 5), numbers.labels.length ? 1.6 : 0.9);
  const ratio = window.devicePixelRatio || 1;
  map.style.width = `${numbers.width * cell}px`;
  map.style.height = `${numbers.height * cell}px`;
  map.width = Math.round(numbers.width * cell * ratio);
  map.height = Math.round(numbers.height * cell * ratio);
  const pen = map.getContext("2d");
  pen.scale(cell * ratio, cell * ratio);

  const shown = algorithm();
  const scale = heatScale();
  numbers.chips.forEach(([x, y, width, height], rank) => {
    pen.fillStyle = colour("--chip");
    if (dead.has(rank)) drawDead(pen, x, y, width, height);
    else pen.fillRect(x, y, width, height);
  });
  numbers.links.forEach(([x, y, width, height], link) => {
    pen.fillStyle = scale[Math.min(Math.round(100 * shown.busy[link]), 100)];
    pen.fillRect(x, y, width, height);
  });
  pen.fillStyle = colour("--ink");
  pen.font = `${12 / cell}px system-ui, sans-serif`;
  for (const [text, x, y] of numbers.labels) pen.fillText(text, x, y);

  if (showPath.checked) outline(pen, shown.pathLinks, colour("--path"), 0.7);
  if (chosenLink >= 0) outline(pen, [chosenLink], colour("--ink"), 0.9);
  if (chosenRank >= 0 && numbers.chips.length) {
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 1;
    pen.strokeRect(...numbers.chips[chosenRank]);
  }
  drawScale(scale);
}

function drawDead(pen, x, y, width, height) {
  pen.strokeStyle = colour("--dead");
  pen.lineWidth = 0.7;
  pen.strokeRect(x, y, width, height);
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x + width, y + height);
  pen.moveTo(x + width, y);
  pen.lineTo(x, y + height);
  pen.stroke();
}

function outline(pen, links, stroke, width) {
  pen.strokeStyle = stroke;
  pen.lineWidth = width;
  for (const link of links) pen.strokeRect(...numbers.links[link]);
}

function drawScale(scale) {
  const canvas = document.getElementById("scale");
  const pen = canvas.getContext("2d");
  scale.forEach((fill, percent) => {
    pen.fillStyle = fill;
    pen.fillRect((percent * canvas.width) / 101, 0, canvas.width / 101 + 1, canvas.height);
  });
}

// What is under the pointer, or chosen by keys.

function tellLink(link) {
  const shown = algorithm();
  const share = (100 * shown.busy[link]).toFixed(1);
  const ends = `${nameNode(numbers.source[link])} → ${nameNode(numbers.destination[link])}`;
  readout.textContent = `${ends}: ${showBytes(shown.bytes[link])}, busy ${share} % of the time`;
}

function tellRank(rank) {
  if (dead.has(rank)) {
    readout.textContent = `${nameNode(rank)}: dead`;
    return;
  }
  const shown = algorithm();
  const parts = (linksOfRank.get(rank) || []).map((link) => {
    return `to ${nameNode(numbers.destination[link])} ${(100 * shown.busy[link]).toFixed(1)} %`;
  });
  readout.textContent = `${nameNode(rank)}: ${parts.join(", ") || "no links"}`;
}

function contains([x, y, width, height], left, top, margin) {
  return left >= x - margin && left <= x + width + margin && top >= y - margin && top <= y + height + margin;
}

map.addEventListener("pointermove", (event) => {
  const left = event.offsetX / cell;
  const top = event.offsetY / cell;
  const link = numbers.links.findIndex((box) => contains(box, left, top, 0.2));
  const rank = link >= 0 ? -1 : numbers.chips.findIndex((box) => contains(box, left, top, 0));
  if (link === chosenLink && rank === chosenRank) return;
  if (link < 0 && rank < 0) return;
  choose(rank, link);
});

function choose(rank, link) {
  chosenRank = rank;
  chosenLink = link;
  if (link >= 0) tellLink(link);
  else tellRank(rank);
  drawMap();
}

map.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const boxes = numbers.chips.length ? numbers.chips : numbers.links;
  const next = nextBox(boxes, numbers.chips.length ? chosenRank : chosenLink, moves[event.key]);
  if (next < 0) return;
  if (numbers.chips.length) choose(next, -1);
  else choose(-1, next);
});

// The closest box in a direction; the first one if none is chosen, -1 at the edge.
function nextBox(boxes, chosen, [right, down]) {
  if (chosen < 0) return 0;
  const [left, top, width, height] = boxes[chosen];
  for (let step = 1; step < 9; step += 1) {
    const x = left + width / 2 + 10 * step * right;
    const y = top + height / 2 + 10 * step * down;
    const found = boxes.findIndex((box, index) => index !== chosen && contains(box, x, y, 2));
    if (found >= 0) return found;
  }
  return -1;
}

// The critical path.

function drawPath() {
  const shown = algorithm();
  const names = ["latency", "bandwidth", "waiting for links"];
  const parts = shown.parts.map((seconds, index) => `${showSeconds(seconds)} of ${names[index]}`);
  document.getElementById("path-text").textContent =
    `The critical path of ${shown.pathLength} ${shown.pathLength === 1 ? "transfer" : "transfers"} takes ` +
    `${showSeconds(shown.seconds)}: ${parts.join(", ")}.` +
    (shown.pathLength > shown.path.length ? ` The table shows the first ${shown.path.length}.` : "");

  const bar = document.getElementById("path-bar");
  bar.replaceChildren();
  shown.parts.forEach((seconds, index) => {
    const share = (100 * Math.max(seconds, 0)) / (shown.seconds || 1);
    const part = document.createElement("span");
    part.style.width = `${share}%`;
    part.style.padding = share < 1 ? "0" : "";
    const percent = `${share.toFixed(0)} %`;
    part.textContent = share > 35 ? `${names[index]} ${percent}` : share > 10 ? percent : "";
    part.title = parts[index];
    bar.append(part);
  });

  const body = document.getElementById("path-rows");
  body.replaceChildren();
  for (const [step, source, destination, size, start, finish] of shown.path) {
    const row = body.insertRow();
    const cells = [step, nameNode(source), nameNode(destination), showBytes(size), showSeconds(start), showSeconds(finish)];
    for (const text of cells) {
      const cell = row.insertCell();
      cell.className = "number";
      cell.textContent = text;
    }
  }
}

function drawAll() {
  drawMap();
  drawPath();
  if (chosenLink >= 0) tellLink(chosenLink);
  else if (chosenRank >= 0) tellRank(chosenRank);
}

if (choice) choice.addEventListener("change", drawAll);
showPath.addEventListener("change", drawMap);
window.addEventListener("resize", drawMap);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
