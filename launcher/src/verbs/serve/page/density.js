// Densities as opacities: functions of a point (x, y, z), with values from 0 to 1. Opacities grow with the square root of
// the density, so that small densities can be seen.

const OPACITY_MAX = 0.7;
const SMOOTH_KM = 250;

// Moves bit k of a number to bit 2k.
function spreadBits(bits) {
  let spread = (bits | (bits << 8)) & 0x00ff00ff;
  spread = (spread | (spread << 4)) & 0x0f0f0f0f;
  spread = (spread | (spread << 2)) & 0x33333333;
  return (spread | (spread << 1)) & 0x55555555;
}

// The HEALPix cell of a point, in the nested scheme.
function cellOf(x, y, z, order) {
  const side = 2 ** order;
  const quarters = ((2 * Math.atan2(y, x)) / Math.PI + 4) % 4;
  const cell = (base, column, row) => (base << (2 * order)) + spreadBits(column) + 2 * spreadBits(row);
  if (Math.abs(z) <= 2 / 3) {
    const [along, across] = [side * (0.5 + quarters), side * z * 0.75];
    const [rising, falling] = [Math.floor(along - across), Math.floor(along + across)];
    const [above, below] = [rising >> order, falling >> order];
    const base = above === below ? above | 4 : above < below ? above : below + 8;
    return cell(base, falling & (side - 1), side - (rising & (side - 1)) - 1);
  }
  const quarter = Math.min(3, Math.floor(quarters));
  const fromPole = side * Math.hypot(x, y) * Math.sqrt(3 / (1 + Math.abs(z)));
  const within = (part) => Math.min(side - 1, Math.floor(part * fromPole));
  const [rising, falling] = [within(quarters - quarter), within(1 - quarters + quarter)];
  return z >= 0 ? cell(quarter, side - falling - 1, side - rising - 1) : cell(quarter + 8, rising, falling);
}

// The density of an answer: a list of [order, cell, probability].
function opacityOfCells(cells) {
  const orderMax = Math.max(...cells.map(([order]) => order));
  const opacities = new Float32Array(12 * 4 ** orderMax);
  const densities = cells.map(([order, , probability]) => probability * 4 ** order);
  const most = Math.max(...densities);
  cells.forEach(([order, cell], at) => {
    const width = 4 ** (orderMax - order);
    opacities.fill(OPACITY_MAX * Math.sqrt(densities[at] / most), cell * width, (cell + 1) * width);
  });
  return (x, y, z) => opacities[cellOf(x, y, z, orderMax)];
}

// The samples, each smoothed with a standard deviation of SMOOTH_KM.
function opacityOfSamples(samples) {
  const points = samples.map(vectorOf);
  const sharpness = (EARTH_RADIUS_KM / SMOOTH_KM) ** 2;
  // For small angles, 1 - cosine is half of the square of the angle.
  const density = (x, y, z) =>
    points.reduce((sum, [px, py, pz]) => sum + Math.exp(sharpness * (x * px + y * py + z * pz - 1)), 0);
  const most = Math.max(...points.map((point) => density(...point)));
  return (x, y, z) => OPACITY_MAX * Math.sqrt(density(x, y, z) / most);
}
