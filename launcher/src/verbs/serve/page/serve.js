// The page of `serve`: an embedding goes to POST /predict, and the answer is shown as a table and on the map.

const state = { rows: null, answer: null, hovered: null, model: null };
const part = (id) => host(id);

const SMOOTH_KM = 250;
// The map shows at least this far around the answer.
const AROUND_KM = 400;

function fail(text) {
  part("error").replaceChildren(text);
  part("error").hidden = text === "";
}

// All places of the answer, the answer first.
const placesOf = (answer) => [
  { name: "answer", place: [answer.lat, answer.lon], weight: answer.weight },
  ...answer.alternatives.map((other, at) => ({ name: `alternative ${at + 1}`, place: [other.lat, other.lon], weight: other.weight })),
];

// A circle on the sphere, as [lat, lon] with longitudes that do not jump.
function circle([lat, lon], km) {
  const [north, angle] = [radians(lat), km / EARTH_RADIUS_KM];
  const points = [];
  for (let step = 0; step <= 120; step += 1) {
    const bearing = (step / 120) * 2 * Math.PI;
    const sine = Math.sin(north) * Math.cos(angle) + Math.cos(north) * Math.sin(angle) * Math.cos(bearing);
    const east = Math.atan2(Math.sin(bearing) * Math.sin(angle) * Math.cos(north), Math.cos(angle) - Math.sin(north) * sine);
    const found = lon + degrees(east);
    const before = points.length ? points[points.length - 1][1] : found;
    points.push([degrees(Math.asin(Math.max(-1, Math.min(1, sine)))), found + 360 * Math.round((before - found) / 360)]);
  }
  return points;
}

// The samples, each smoothed over SMOOTH_KM, but neither smaller than a few pixels nor larger than a part of the map.
function paintDensity(map, samples) {
  const { context } = map;
  const radius = Math.max(16, Math.min(map.height / 6, degrees(SMOOTH_KM / EARTH_RADIUS_KM) * map.scale));
  const alpha = Math.min(0.6, 1.6 / Math.sqrt(samples.length));
  for (const sample of samples) {
    const [x, y] = map.pixel(sample);
    const stretch = Math.min(6, 1 / Math.max(0.1, Math.cos(radians(sample[0]))));
    context.save();
    context.translate(x, y);
    context.scale(stretch, 1);
    const shade = context.createRadialGradient(0, 0, 0, 0, 0, radius);
    for (let step = 0; step <= 4; step += 1) {
      const strength = Math.exp(-((step / 4) ** 2) * 4) * (1 - step / 4);
      const opacity = Math.round(255 * alpha * strength).toString(16).padStart(2, "0");
      shade.addColorStop(step / 4, `${color("density")}${opacity}`);
    }
    context.fillStyle = shade;
    context.beginPath();
    context.arc(0, 0, radius, 0, 2 * Math.PI);
    context.fill();
    context.restore();
  }
}

function paint(map) {
  const { answer } = state;
  if (!answer) return;
  paintDensity(map, answer.samples);
  for (const sample of answer.samples) map.dot(sample, 3, color("density"), null);
  const [first, ...others] = placesOf(answer);
  if (answer.radius_50_km !== null) {
    map.line(circle(first.place, answer.radius_50_km), color("accent"), 2);
    map.line(circle(first.place, answer.radius_90_km), color("accent"), 1);
  }
  others.forEach((other) => map.dot(other.place, 5 + 9 * Math.sqrt(other.weight), null, color("density")));
  map.dot(first.place, 7, color("accent"), color("paper"));
  if (state.hovered) map.dot(state.hovered.place, 14, null, color("mark"));
}

function nearest(x, y) {
  if (!state.answer) return null;
  const items = [...placesOf(state.answer), ...state.answer.samples.map((place) => ({ name: "sample", place }))];
  let [found, best] = [null, 12];
  for (const item of items) {
    const [px, py] = map.pixel(item.place);
    const away = Math.hypot(px - x, py - y);
    if (away < best) [found, best] = [item, away];
  }
  return found;
}

const percent = (share) => `${Math.round(100 * share)} %`;

function hover(x, y, event) {
  const found = nearest(x, y);
  if (found?.place.join() !== state.hovered?.place.join()) {
    state.hovered = found;
    map.draw();
  }
  if (!found) return hideTip();
  const share = found.weight === undefined ? [] : [`${percent(found.weight)} of the samples`];
  return showTip(event.clientX, event.clientY, [found.name, placeText(found.place), ...share]);
}

function leave() {
  state.hovered = null;
  hideTip();
  map.draw();
}

const map = new WorldMap(part("map"), "Map of the answer", { paint, hover, leave });

function show(answer) {
  state.answer = answer;
  state.hovered = null;
  const places = placesOf(answer);
  part("place").replaceChildren(placeText(places[0].place));
  part("radii").replaceChildren(answer.radius_50_km === null
    ? "No radii: this run is not calibrated (`eval --calibrate`)."
    : `within ${kmText(answer.radius_50_km)} with 50 % and ${kmText(answer.radius_90_km)} with 90 % probability (circles)`);
  const look = (item) => () => {
    state.hovered = item;
    map.draw();
  };
  part("places").replaceChildren(...places.map((item) => element("tr", { onmouseenter: look(item), onmouseleave: leave },
    element("th", { scope: "row" }, element("button", { type: "button", onfocus: look(item), onclick: () => map.fit([item.place, ...circle(item.place, AROUND_KM)]) }, item.name)),
    element("td", {}, placeText(item.place)), element("td", {}, percent(item.weight)))));
  part("result").hidden = false;
  const around = circle(places[0].place, Math.max(AROUND_KM, answer.radius_90_km ?? 0));
  map.fit([...places.map((item) => item.place), ...answer.samples, ...around]);
}

function clear() {
  state.answer = null;
  part("result").hidden = true;
  leave();
}

function showRows() {
  const several = state.rows !== null && state.rows.length > 1;
  part("row-label").hidden = !several;
  part("row").max = several ? state.rows.length - 1 : 0;
  part("rows").replaceChildren(several ? `of ${count(state.rows.length)}, from 0` : "");
}

async function ask(numbers) {
  const headers = { "Content-Type": "application/json" };
  if (part("token").value) headers.Authorization = `Bearer ${part("token").value}`;
  const body = JSON.stringify({ embeddings: [numbers], samples: true });
  const reply = await fetch("/predict", { method: "POST", headers, body });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error);
  return found.rows[0];
}

async function locate() {
  fail("");
  part("state").replaceChildren("locating ...");
  part("locate").disabled = true;
  const begun = performance.now();
  try {
    const rows = state.rows ?? readText(part("text").value);
    const row = rows.length > 1 ? Number(part("row").value) : 0;
    if (!rows[row]) throw new Error(`there is no row ${part("row").value}; the rows are 0 to ${rows.length - 1}`);
    const bad = rows[row].findIndex((number) => !Number.isFinite(number));
    if (bad >= 0) throw new Error(`number ${bad} of the embedding is not a finite number`);
    show(await ask(rows[row]));
    part("state").replaceChildren(`${Math.round(performance.now() - begun)} ms`);
  } catch (error) {
    part("state").replaceChildren("");
    clear();
    fail(error instanceof TypeError ? "the service cannot be reached; is it still running?" : error.message);
  } finally {
    part("locate").disabled = false;
  }
}

async function take(file) {
  fail("");
  try {
    state.rows = await readFile(file);
    part("row").value = 0;
    part("text").value = "";
    part("text").placeholder = `${file.name}: ${count(state.rows.length)} × ${count(state.rows[0].length)} numbers`;
    showRows();
    await locate();
  } catch (error) {
    state.rows = null;
    showRows();
    clear();
    fail(error.message);
  }
}

async function connect() {
  try {
    const reply = await fetch("/healthz");
    const found = await reply.json();
    if (!reply.ok) throw new Error(found.error);
    state.model = found;
    const how = found.hybrid ? "LocDiff-H" : "LocDiff";
    part("about").replaceChildren(`${how}, run ${found.run}, step ${count(found.step)}; embeddings of ${count(found.width)} numbers, ${count(found.samples)} samples per photo`);
    part("token-label").hidden = !found.token;
  } catch (error) {
    part("about").replaceChildren(error instanceof TypeError ? "the service cannot be reached" : error.message);
    setTimeout(connect, 1000);
  }
}

part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  locate();
});
part("text").addEventListener("input", () => {
  state.rows = null;
  showRows();
});
part("row").addEventListener("change", locate);
part("file").addEventListener("change", () => part("file").files[0] && take(part("file").files[0]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => event.relatedTarget === null && document.body.classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const [file] = event.dataTransfer.files;
  const text = event.dataTransfer.getData("text");
  if (file) take(file);
  else if (text) {
    part("text").value = text;
    state.rows = null;
    showRows();
    locate();
  }
});
connect().finally(() => {
  document.documentElement.dataset.ready = "true";
});
