// The map of all answers, with filters by system and by error.
function drawAnswers(parent, openPhoto) {
  const state = { system: data.systems.length - 1, draw: "truth", from: 0, to: Infinity, bands: BANDS.map(() => true) };
  let items = [];
  let hovered = null;
  const status = element("output", { "aria-live": "polite" });
  const placesOf = ([system, photo]) => {
    const own = data.systems[system];
    return { truth: pair(data.photo_sets[own.photo_set].truth, photo), answer: pair(own.answers, photo) };
  };
  const shownPlaces = (item) => {
    const { truth, answer } = placesOf(item);
    return { truth: [truth], answer: [answer], lines: [answer, truth] }[state.draw];
  };

  const paint = (map) => {
    const radius = Math.min(6, 2.4 + Math.log2(map.zoom) * 0.4);
    if (state.draw === "lines") {
      map.context.globalAlpha = 0.55;
      const colors = BANDS.map((_, band) => color(`b${band}`));
      for (const item of items) {
        const { truth, answer } = placesOf(item);
        item[3] ??= arc(truth, answer);
        map.line(item[3], colors[bandOf(item[2])], 1);
      }
      map.context.globalAlpha = 1;
      const mark = color("mark");
      for (const item of items) map.dot(placesOf(item).truth, radius * 0.6, mark, null);
    }
    for (let band = BANDS.length - 1; band >= 0; band -= 1) {
      map.context.fillStyle = color(`b${band}`);
      map.context.beginPath();
      for (const item of items) {
        if (bandOf(item[2]) !== band) continue;
        const { truth, answer } = placesOf(item);
        const [x, y] = map.pixel(state.draw === "truth" ? truth : answer);
        if (x < -9 || y < -9 || x > map.width + 9 || y > map.height + 9) continue;
        map.context.moveTo(x + radius, y);
        map.context.arc(x, y, radius, 0, 2 * Math.PI);
      }
      map.context.fill();
    }
    if (hovered) {
      const { truth, answer } = placesOf(hovered);
      map.line(arc(truth, answer), color("ink"), 1.5);
      map.dot(truth, radius + 3, null, color("mark"));
      map.dot(answer, radius + 1, color(`b${bandOf(hovered[2])}`), color("mark"));
    }
  };

  const nearest = (x, y) => {
    let found = null;
    let best = 10;
    for (const item of items) {
      for (const place of shownPlaces(item)) {
        const [px, py] = map.pixel(place);
        const distance = Math.hypot(px - x, py - y);
        if (distance < best) [best, found] = [distance, item];
      }
    }
    return found;
  };
  const hover = (x, y, event) => {
    const found = nearest(x, y);
    if (found !== hovered) {
      hovered = found;
      map.draw();
    }
    if (!found) return hideTip();
    const [system, photo, km] = found;
    const { truth, answer } = placesOf(found);
    const { ids } = data.photo_sets[data.systems[system].photo_set];
    const lines = [ids[photo], `truth: ${placeText(truth)}`, `answer: ${placeText(answer)}`, `error: ${kmText(km)}`, data.systems[system].name];
    return showTip(event.clientX, event.clientY, lines);
  };
  const leave = () => {
    hovered = null;
    hideTip();
    map.draw();
  };
  const select = (x, y) => {
    const found = nearest(x, y);
    if (found) openPhoto(data.systems[found[0]].photo_set, found[1], found[0]);
  };

  const boxes = BANDS.map((band, at) => {
    const tally = element("span", { class: "tally" });
    const box = element("input", { type: "checkbox", checked: true, onchange: () => { state.bands[at] = box.checked; filter(); } });
    return { tally, label: element("label", {}, box, element("span", { class: `swatch b${at}` }), band.name, " ", tally) };
  });
  const filter = () => {
    const tallies = BANDS.map(() => 0);
    let photos = 0;
    items = [];
    data.systems.forEach((_, system) => {
      if (state.system !== -1 && state.system !== system) return;
      errorsOf[system].forEach((km, photo) => {
        photos += 1;
        if (km < state.from || km > state.to) return;
        tallies[bandOf(km)] += 1;
        if (state.bands[bandOf(km)]) items.push([system, photo, km]);
      });
    });
    hovered = null;
    boxes.forEach((box, at) => box.tally.replaceChildren(count(tallies[at])));
    status.replaceChildren(`${count(items.length)} of ${count(photos)} answers`);
    map.draw();
  };

  const option = (value, text, selected) => element("option", { value, selected }, text);
  const systems = element("select", { onchange: () => { state.system = Number(systems.value); filter(); } },
    data.systems.map((system, at) => option(at, system.name, at === state.system)),
    data.systems.length > 1 ? option(-1, "all systems", false) : []);
  const draws = element("select", { onchange: () => { state.draw = draws.value; map.draw(); } },
    option("truth", "true places", true), option("answer", "answers", false), option("lines", "lines from truth to answer", false));
  const limit = (name, key, empty) => {
    const input = element("input", { type: "number", min: 0, step: "any", oninput: () => {
      state[key] = input.value === "" || Number.isNaN(input.valueAsNumber) ? empty : input.valueAsNumber;
      filter();
    } });
    return element("label", {}, name, input);
  };
  parent.append(
    element("div", { class: "controls" },
      element("label", {}, "system", systems), element("label", {}, "show", draws),
      limit("error from", "from", 0), limit("to", "to", Infinity), "km", status),
    element("div", { class: "controls", role: "group", "aria-label": "Ranges of the error" }, boxes.map((box) => box.label)));
  const map = new WorldMap(parent, "Map of the answers", { paint, hover, leave, select });
  filter();
}
