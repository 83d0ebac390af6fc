// The page of `serve`: an embedding goes to POST /predict, and the answer is shown as a table and on the globe.

const state = { rows: null, answer: null, opacityOf: null, hovered: null, model: null };
const part = (id) => host(id);

// The globe shows at least this far around the answer.
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

function paint() {
  const { answer } = state;
  if (!answer) return;
  globe.shade(color("density"), state.opacityOf);
  for (const sample of answer.samples) globe.dot(sample, 3, color("density"), color("paper"));
  const [first, ...others] = placesOf(answer);
  if (answer.radius_50_km !== null) {
    globe.line(circle(first.place, answer.radius_50_km), color("accent"), 2);
    globe.line(circle(first.place, answer.radius_90_km), color("accent"), 1);
  }
  others.forEach((other) => globe.dot(other.place, 5 + 9 * Math.sqrt(other.weight), null, color("density")));
  globe.dot(first.place, 7, color("accent"), color("paper"));
  if (state.hovered) globe.dot(state.hovered.place, 14, null, color("mark"));
}

function nearest(x, y) {
  if (!state.answer) return null;
  const items = [...placesOf(state.answer), ...state.answer.samples.map((place) => ({ name: "sample", place }))];
  let [found, best] = [null, 12];
  for (const item of items) {
    const [px, py] = globe.pixel(item.place);
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
    globe.draw();
  }
  if (!found) return hideTip();
  const share = found.weight === undefined ? [] : [`${percent(found.weight)} of the samples`];
  return showTip(event.clientX, event.clientY, [found.name, placeText(found.place), ...share]);
}

function leave() {
  state.hovered = null;
  hideTip();
  globe.draw();
}

function select(x, y) {
  const found = nearest(x, y);
  if (found) globe.turnTo(found.place);
}

const globe = new Globe(part("globe"), "Globe with the answer", { paint, hover, leave, select });

function show(answer) {
  state.answer = answer;
  state.opacityOf = answer.density ? opacityOfCells(answer.density) : opacityOfSamples(answer.samples);
  state.hovered = null;
  const places = placesOf(answer);
  part("place").replaceChildren(placeText(places[0].place));
  part("radii").replaceChildren(answer.radius_50_km === null
    ? "No radii: the model is not calibrated (`eval --calibrate`)."
    : `within ${kmText(answer.radius_50_km)} with 50 % and ${kmText(answer.radius_90_km)} with 90 % probability (circles)`);
  const look = (item) => () => {
    state.hovered = item;
    globe.draw();
  };
  part("places").replaceChildren(...places.map((item) => element("tr", { onmouseenter: look(item), onmouseleave: leave },
    element("th", { scope: "row" }, element("button", { type: "button", onfocus: look(item), onclick: () => globe.turnTo(item.place) }, item.name)),
    element("td", {}, placeText(item.place)), element("td", {}, percent(item.weight)))));
  const shade = answer.density ? "the density"
    : `the samples, smoothed over ${SMOOTH_KM} km: the run has no densities (\`eval --calibrate\`)`;
  const marks = "Dots: the answer and its samples. Circles: the alternatives, larger with more samples.";
  part("legend").replaceChildren(`${marks} Shade: ${shade}.`);
  part("result").hidden = part("legend").hidden = false;
  const around = circle(places[0].place, Math.max(AROUND_KM, answer.radius_90_km ?? 0));
  globe.fit([...places.map((item) => item.place), ...answer.samples, ...around]);
}

function clear() {
  state.answer = null;
  part("result").hidden = part("legend").hidden = true;
  leave();
}

function showRows() {
  const several = state.rows !== null && state.rows.length > 1;
  part("row-label").hidden = !several;
  part("row").max = several ? state.rows.length : 1;
  part("rows").replaceChildren(several ? `of ${count(state.rows.length)}` : "");
}

async function ask(numbers) {
  const headers = { "Content-Type": "application/json" };
  if (part("token").value) headers.Authorization = `Bearer ${part("token").value}`;
  const body = JSON.stringify({ embeddings: [numbers], samples: true, density: state.model?.density ?? false });
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
    const row = rows[rows.length > 1 ? Number(part("row").value) - 1 : 0];
    if (!row) throw new Error(`there is no row ${part("row").value}; the rows are 1 to ${rows.length}`);
    const bad = row.findIndex((number) => !Number.isFinite(number));
    if (bad >= 0) throw new Error(`number ${bad + 1} of the embedding is not a finite number`);
    show(await ask(row));
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
    part("row").value = 1;
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
    const how = found.samples === null ? "retrieval" : found.hybrid ? "LocDiff-H" : "LocDiff";
    const samples = found.samples === null ? "" : `, ${count(found.samples)} samples per photo`;
    part("about").replaceChildren(`${how}, ${found.model}, step ${count(found.step)}; embeddings of ${count(found.width)} numbers${samples}`);
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
