// The data of the report, and the errors of all systems.

const data = JSON.parse(document.getElementById("data").textContent);

const BANDS = [
  { below: 25, name: "< 25 km" },
  { below: 200, name: "< 200 km" },
  { below: 750, name: "< 750 km" },
  { below: 2500, name: "< 2500 km" },
  { below: Infinity, name: "≥ 2500 km" },
];

const bandOf = (km) => BANDS.findIndex((band) => km < band.below);
const pair = (flat, at) => [flat[2 * at], flat[2 * at + 1]];

// For each system, the error of each shown photo in km.
const errorsOf = data.systems.map((system) => {
  const { ids, truth } = data.photo_sets[system.photo_set];
  return ids.map((_, at) => distanceKm(pair(truth, at), pair(system.answers, at)));
});
