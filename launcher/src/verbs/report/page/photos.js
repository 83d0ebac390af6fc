// Single photos: the truth, the answers of all systems and, if the evaluation kept them, the samples, the alternatives and
// the density along the denoising steps.

function drawPhotos(parent) {
  const state = { set: 0, at: 0, order: [], run: 0, image: null, step: 0 };
  const details = new Map(data.images.map((image) => [`${image.run}\n${image.id}`, image]));
  const systemsOf = (set) => data.systems.map((system, at) => ({ ...system, at })).filter((system) => system.photo_set === set);
  // What the runs have sampled for a photo.
  const imagesOf = (set, photo) => {
    const runs = [...new Set(systemsOf(set).map((system) => system.run))];
    return runs.map((run) => details.get(`${run}\n${data.photo_sets[set].ids[photo]}`)).filter(Boolean);
  };
  const hasImage = (set, photo) => imagesOf(set, photo).length > 0;
  const photo = () => state.order[state.at];
  const truth = () => pair(data.photo_sets[state.set].truth, photo());

  const paint = (map) => {
    if (state.order.length === 0) return;
    const image = state.image;
    if (image?.steps[state.step]) paintCells(map, image.steps[state.step]);
    for (const sample of image?.samples ?? []) map.dot(sample, 4.5, color("density"), color("paper"));
    for (const other of image?.alternatives ?? []) map.dot([other.lat, other.lon], 5 + 8 * Math.sqrt(Math.max(0, other.weight)), null, color("density"));
    for (const system of systemsOf(state.set)) {
      const answer = pair(system.answers, photo());
      map.line(arc(truth(), answer), color(`s${system.at % COLORS}`), 1.5);
    }
    for (const system of systemsOf(state.set)) map.dot(pair(system.answers, photo()), 5, color(`s${system.at % COLORS}`), color("paper"));
    map.dot(truth(), 7, null, color("mark"));
    map.dot(truth(), 2.5, color("mark"), null);
  };

  const title = element("h3");
  const place = element("p", { class: "note" });
  const rows = element("tbody");
  const extra = element("div");
  const sources = element("div", { class: "controls" });
  const steps = element("div", { class: "controls" });
  const position = element("output", { "aria-live": "polite" });

  const row = (name, classes, where, value) => element("tr", {},
    element("th", { scope: "row" }, classes ? element("span", { class: `swatch ${classes}` }) : "", ` ${name}`),
    element("td", {}, placeText(where)), element("td", {}, value));
  const showSteps = () => {
    const all = state.image?.steps ?? [];
    steps.hidden = all.length === 0;
    if (all.length === 0) return;
    const name = element("output", { class: "tally" });
    const choose = (at) => {
      state.step = at;
      const { t, cells } = all[at];
      name.replaceChildren(`t = ${t}: half of the probability is on ${count(Number(halfAreaKm2(cells).toPrecision(2)))} km²`);
      map.draw();
    };
    const slider = element("input", { type: "range", min: 0, max: all.length - 1, value: state.step, oninput: () => choose(Number(slider.value)) });
    steps.replaceChildren(element("label", {}, "density at denoising step", slider), name);
    choose(state.step);
  };
  const showSources = (images) => {
    sources.hidden = images.length < 2;
    const options = images.map(({ run }) => element("option", { value: run, selected: run === state.image.run }, data.runs[run].name));
    const source = element("select", { onchange: () => { state.run = Number(source.value); show(); } }, options);
    sources.replaceChildren(element("label", {}, "samples of", source));
  };
  const show = () => {
    if (state.order.length === 0) return;
    const set = data.photo_sets[state.set];
    const images = imagesOf(state.set, photo());
    state.image = images.find((image) => image.run === state.run) ?? images[0] ?? null;
    state.step = Math.max(0, (state.image?.steps.length ?? 0) - 1);
    title.replaceChildren(set.ids[photo()]);
    place.replaceChildren(`truth: ${placeText(truth())}`);
    rows.replaceChildren(...systemsOf(state.set).map((system) =>
      row(system.name, `s${system.at % COLORS}`, pair(system.answers, photo()), kmText(errorsOf[system.at][photo()]))));
    const image = state.image;
    const others = (image?.alternatives ?? []).map((other, at) => ({ ...other, name: `alternative ${at + 1}` }));
    const answer = image?.answer ? [{ name: "answer", lat: image.answer[0], lon: image.answer[1], weight: image.weight }] : [];
    const samples = image?.samples.length ? [element("p", { class: "note" }, `${image.samples.length} samples (dots); share of the samples nearest to each place:`)] : [];
    const likely = [...answer, ...others].map(({ name, lat, lon, weight }) => row(name, null, [lat, lon], weight === null ? "" : shortNumber(weight)));
    const table = element("div", { class: "wide", tabindex: 0 }, element("table", {}, element("tbody", {}, likely)));
    extra.replaceChildren(...samples, ...(likely.length ? [table] : []));
    showSources(images);
    showSteps();
    position.replaceChildren(`${count(state.at + 1)} of ${count(state.order.length)}`);
    const answers = systemsOf(state.set).map((system) => pair(system.answers, photo()));
    map.fit([truth(), ...answers, ...(image?.samples ?? [])]);
  };
  const go = (to) => {
    if (state.order.length === 0) return;
    state.at = (to + state.order.length) % state.order.length;
    show();
  };
  const sort = () => {
    const { ids } = data.photo_sets[state.set];
    const [kind, system] = order.value.split(":");
    const errors = errorsOf[Number(system)];
    state.order = ids.map((_, at) => at).filter((at) => !only?.checked || hasImage(state.set, at));
    if (kind === "most") state.order.sort((a, b) => errors[b] - errors[a]);
    if (kind === "least") state.order.sort((a, b) => errors[a] - errors[b]);
  };
  const orders = () => {
    const of = (kind, text) => systemsOf(state.set).map((system) => element("option", { value: `${kind}:${system.at}` }, `${text} error, ${system.name}`));
    order.replaceChildren(element("option", { value: "data:0" }, "order of the data"), ...of("least", "smallest"), ...of("most", "largest"));
  };
  const open = (set, at) => {
    if (set !== state.set) {
      state.set = set;
      if (sets) sets.value = set;
      orders();
    }
    if (only && !hasImage(set, at)) only.checked = false;
    sort();
    state.at = Math.max(0, state.order.indexOf(at));
    show();
  };

  const order = element("select", { onchange: () => { sort(); go(0); } });
  const only = data.images.length ? element("input", { type: "checkbox", checked: true, onchange: () => { sort(); go(0); } }) : null;
  const sets = data.photo_sets.length > 1
    ? element("select", { onchange: () => { state.set = Number(sets.value); orders(); sort(); go(0); } },
      data.photo_sets.map((_, at) => element("option", { value: at }, systemsOf(at).map((system) => data.runs[system.run].name)[0])))
    : null;
  const wanted = element("input", { type: "search", placeholder: "part of an id" });
  const find = (event) => {
    event.preventDefault();
    const { ids } = data.photo_sets[state.set];
    const after = () => state.order.map((_, row) => (state.at + 1 + row) % state.order.length).find((row) => ids[state.order[row]].includes(wanted.value));
    let next = after();
    if (next === undefined && only?.checked) {
      only.checked = false;
      sort();
      next = after();
    }
    if (next === undefined) position.replaceChildren("no such id");
    else go(next);
  };
  const button = (text, act) => element("button", { type: "button", onclick: act }, text);
  const search = element("form", { class: "controls", onsubmit: find }, element("label", {}, "id", wanted), element("button", {}, "Find"));
  parent.append(element("div", { class: "controls" }, button("← Previous", () => go(state.at - 1)), button("Next →", () => go(state.at + 1)), position,
    sets ? element("label", {}, "photos of", sets) : [], element("label", {}, "order", order),
    only ? element("label", {}, only, "only photos with samples") : [], search));
  const [left, right] = [element("div"), element("div")];
  parent.append(element("div", { class: "photo" }, left, right));
  const map = new WorldMap(left, "Map of one photo", { paint });
  right.append(title, place, element("div", { class: "wide", tabindex: 0 }, element("table", {}, rows)), sources, extra, steps);
  orders();
  sort();
  if (state.order.length === 0 && only) {
    only.checked = false;
    sort();
  }
  show();
  return (set, at) => {
    open(set, at);
    parent.scrollIntoView({ block: "nearest" });
  };
}
