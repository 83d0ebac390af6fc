//! The page of `serve` in a browser.

use std::path::Path;

use locdiff_core::geo::{Healpix, fibonacci_grid};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::super::density::calibrated;
use super::super::support::browse;
use super::{Service, numbers};
use crate::stage::Stage;

/// Waits until the page has an answer or an error.
const SETTLED: &str = "new Promise((done) => { const look = () => document.getElementById('locate').disabled || \
    document.documentElement.dataset.ready !== 'true' ? setTimeout(look, 20) : done(); setTimeout(look, 20); })";
/// The answer, the number of rows of the table, and the error.
const SHOWN: &str = "[document.getElementById('place').textContent, document.getElementById('places').rows.length, \
    document.getElementById('error').hidden ? '' : document.getElementById('error').textContent]";

/// Puts numbers into the text field and locates them.
fn locate(text: &str) -> Value {
    json!({ "eval": format!(
        "document.getElementById('text').value = {}; state.rows = null; document.getElementById('locate').click()",
        json!(text)
    )})
}

fn choose_row(row: usize) -> Value {
    json!({ "eval": format!(
        "(() => {{ const field = document.getElementById('row'); field.value = {row}; \
         field.dispatchEvent(new Event('change')); }})()"
    )})
}

fn drop_file(name: &str, text: &str) -> Value {
    json!({ "eval": format!(
        "(() => {{ const data = new DataTransfer(); data.items.add(new File([{}], {})); \
         document.dispatchEvent(new DragEvent('drop', {{ dataTransfer: data, bubbles: true, cancelable: true }})); }})()",
        json!(text), json!(name)
    )})
}

/// A step that saves a picture, if the variable LOCDIFF_SCREENSHOTS names a folder.
fn shot(name: &str) -> Value {
    match std::env::var("LOCDIFF_SCREENSHOTS") {
        Ok(folder) => json!({ "screenshot": Path::new(&folder).join(name) }),
        Err(_) => json!({ "eval": "undefined" }),
    }
}

/// Opens the page, does the steps, and returns the values. Checks that the page asks only the service, and that the
/// console has `problems` errors.
fn values(stage: &Stage, service: &Service, steps: &Value, problems: usize) -> Option<Vec<Value>> {
    let own = format!("http://127.0.0.1:{}/", service.port);
    let found = browse(stage, &own, steps)?;
    assert_eq!(found["problems"].as_array().map(Vec::len), Some(problems), "{found}");
    for request in found["requests"].as_array().expect("there is a list of requests") {
        let url = request.as_str().unwrap_or_default();
        assert!(url.starts_with(&own) || url.starts_with("data:"), "the page asked for {url}");
    }
    Some(found["values"].as_array().expect("there is a list of values").clone())
}

/// One test, because each stage trains a model.
#[test]
fn page_answers_pasted_numbers_and_dropped_files_and_its_globe_turns() {
    let stage = calibrated();
    let service = Service::start(&stage, "");
    if inputs_are_located_or_refused(&stage, &service) {
        globe_can_be_turned_and_zoomed(&stage, &service);
        globe_shows_land_and_densities(&stage, &service);
    }
    service.end(Signal::SIGINT);
}

/// Returns false if there is no browser.
fn inputs_are_located_or_refused(stage: &Stage, service: &Service) -> bool {
    let csv = format!("image_id,emb\na,\"{}\"\nb,\"{}\"\n", numbers(1001), numbers(1000));
    let (wait, shown) = (json!({ "eval": SETTLED }), json!({ "eval": SHOWN }));
    let steps = json!([
        wait, shot("serve-empty.png"), { "eval": "document.getElementById('about').textContent" },
        locate(&numbers(1000)), wait, shown, shot("serve-answer.png"),
        { "eval": "document.getElementById('legend').textContent" },
        drop_file("photos.csv", &csv), wait, { "eval": "new Promise((done) => setTimeout(done, 300))" }, wait, shown,
        choose_row(2),
        wait, shown, shot("serve-file.png"),
        choose_row(3),
        wait, shown,
        drop_file("photo.gif", "x"), wait, shown,
        locate("1, 2, x"), wait, shown, shot("serve-error.png"),
    ]);
    let Some(values) = values(stage, service, &steps, 0) else { return false };
    let about = values[0].as_str().unwrap_or_default();
    assert!(about.contains("run small, step 40; embeddings of 12 numbers"), "{about}");
    let answer: Value = serde_json::from_str(&service.post(&numbers(1000)).1).expect("the answer is JSON");
    let degrees = |value: &Value| format!("{:.3}°", value.as_f64().expect("it is a number").abs());
    let place = |at: usize| values[at][0].as_str().unwrap_or_default().to_owned();
    assert!(place(1).contains(&degrees(&answer["lat"])) && place(1).contains(&degrees(&answer["lon"])), "{values:?}");
    let rows = answer["alternatives"].as_array().map_or(0, Vec::len) + 1;
    assert_eq!((&values[1][1], &values[1][2]), (&json!(rows), &json!("")), "{values:?}");
    assert!(values[2].as_str().is_some_and(|text| text.ends_with("Shade: the density.")), "{values:?}");
    // The second row of the file is the photo that was pasted first.
    assert!(place(3) != place(1) && place(4) == place(1), "{values:?}");
    for (at, error) in [
        (5, "there is no row 3; the rows are 1 to 2"),
        (6, "photo.gif: wanted a .json, .csv or .npy file"),
        (7, "number 3 is “x”, which is not a number"),
    ] {
        assert_eq!(values[at][2], error, "{values:?}");
    }
    // A request that the service refuses: the reason is shown. The browser itself reports the status.
    let steps = json!([wait, locate("1, 2"), wait, shown]);
    let values = self::values(stage, service, &steps, 1).expect("there is a browser");
    assert_eq!(values[0][2], "the embedding has 2 numbers, wanted 12");
    true
}

fn globe_can_be_turned_and_zoomed(stage: &Stage, service: &Service) {
    let state = json!({ "eval": "[globe.center.lat, globe.center.lon, globe.zoom]" });
    let under = json!({ "eval": "(() => { const b = globe.canvas.getBoundingClientRect(); \
                                 return globe.pointAt(900 - b.left, 300 - b.top); })()" });
    // Frames that come at once, 100 ms apart for the globe.
    let moving = "(() => { const seen = []; let now = performance.now(); window.matchMedia = () => ({ matches: false }); \
                  window.requestAnimationFrame = (act) => setTimeout(() => act(now += 100), 0); \
                  globe.center = { lat: 0, lon: 170 }; globe.turnTo([0, -150]); return new Promise((done) => { \
                  const look = () => { seen.push(globe.center.lon); globe.turn ? setTimeout(look, 0) : done(seen); }; look(); }); })()";
    let steps = json!([
        { "eval": SETTLED }, locate(&numbers(1000)), { "eval": SETTLED }, state,
        { "eval": "[state.answer.lat, state.answer.lon, state.answer.alternatives.length]" },
        { "eval": "(() => { const b = globe.canvas.getBoundingClientRect(); const [x, y] = globe.pixel([state.answer.lat, state.answer.lon]); \
                   const event = new PointerEvent('pointermove', { clientX: b.left + x, clientY: b.top + y, bubbles: true }); \
                   globe.canvas.dispatchEvent(event); return document.getElementById('tip').textContent; })()" },
        { "eval": "globe.turnTo([10, 20], 1)" }, state, under, { "wheel": [900, 300, -600] }, state, under, { "click": "button[title='Whole world']" }, state,
        { "eval": "globe.canvas.focus()" }, { "key": "ArrowRight" }, state, { "key": "+" }, state,
        { "drag": [800, 400, 700, 450] }, state,
        // The last row of the table, which is an alternative if there is one.
        { "click": "#places tr:last-child button" }, state,
        { "eval": "(({ place }) => place)(placesOf(state.answer).at(-1))" },
        { "eval": moving },
        // Zooming at the edge of the globe.
        { "eval": "(() => { for (let y = 0; y < globe.height; y += 5) for (const x of [10, globe.width / 4]) { \
                   globe.center = { lat: 0, lon: 10 }; globe.zoom = 1.2; globe.zoomBy(0.85, x, y); \
                   if (!(Math.abs(globe.center.lat) <= 90)) return 'lost'; } return 'kept'; })()" },
    ]);
    let values = values(stage, service, &steps, 0).expect("there is a browser");
    assert_eq!(values.last(), Some(&json!("kept")), "zooming lost the middle of the globe");
    let number = |at: usize, part: usize| values[at][part].as_f64().unwrap_or(f64::NAN);
    let is_at = |at: usize, place: usize| (0..2).all(|part| (number(at, part) - number(place, part)).abs() < 1e-6);
    assert!(is_at(0, 1), "the answer is not in the middle: {values:?}");
    assert!(values[2].as_str().is_some_and(|text| text.starts_with("answer")), "{values:?}");
    assert!(number(5, 2) > number(3, 2) && number(7, 2) == 1.0, "the wheel or the button did not zoom: {values:?}");
    let cosine: f64 = (0..3).map(|axis| number(4, axis) * number(6, axis)).sum();
    assert!(cosine > 0.9999, "the place under the pointer moved: {values:?}");
    assert!(number(8, 1) != number(7, 1) && number(8, 0) == number(7, 0), "the key did not turn the globe: {values:?}");
    assert!(number(9, 2) > number(8, 2), "the key did not zoom: {values:?}");
    assert!(number(10, 0) > number(9, 0) && number(10, 1) != number(9, 1), "dragging did not turn it: {values:?}");
    assert!(is_at(11, 12), "the globe did not turn to the alternative: {values:?}");
    // The short way, across the 180th meridian, in several steps.
    let seen: Vec<f64> =
        values[13].as_array().expect("a list of longitudes").iter().filter_map(Value::as_f64).collect();
    let east = |lon: &f64| lon.rem_euclid(360.0);
    assert!(seen.iter().all(|lon| (170.0..=210.1).contains(&east(lon))) && seen.len() > 2, "{seen:?}");
    assert!((east(seen.last().expect("it is not empty")) - 210.0).abs() < 1e-6, "{seen:?}");
    assert!(seen.iter().any(|lon| (175.0..205.0).contains(&east(lon))), "the globe jumped: {seen:?}");
}

fn globe_shows_land_and_densities(stage: &Stage, service: &Service) {
    let colors = "(places) => { clear(); \
                  const dot = element('canvas', { width: 1, height: 1 }).getContext('2d', { willReadFrequently: true }); \
                  return places.map(([lat, lon]) => { globe.center = { lat, lon }; globe.zoom = 1; globe.drawWorld(); \
                  const size = devicePixelRatio / 2; \
                  dot.drawImage(globe.canvas, -globe.width * size - 3, -globe.height * size - 3); \
                  const found = [...dot.getImageData(0, 0, 1, 1).data].slice(0, 3); \
                  const hex = '#' + found.map((part) => part.toString(16).padStart(2, '0')).join(''); \
                  return ['land', 'sea'].find((name) => color(name) === hex); }); }";
    // In the middle of land and of seas. Some of the opposite places are land.
    let places = json!([
        [12, 20],
        [0, -28],
        [-80, 100],
        [-45, -165],
        [5, -160],
        [32, 100],
        [-25, 130],
        [-85, 0],
        [88, 40],
        [42, -100]
    ]);
    let wanted = ["land", "sea", "land", "sea", "sea", "land", "land", "land", "sea", "land"];
    let points: Vec<[f64; 3]> = fibonacci_grid(400).iter().map(|point| point.xyz()).collect();
    let opposite = "state.opacityOf(...vectorOf([-state.answer.lat, state.answer.lon + 180]))";
    let at_answer = "state.opacityOf(...vectorOf(state.answer.samples[0]))";
    let steps = json!([
        { "eval": SETTLED }, locate(&numbers(1000)), { "eval": SETTLED },
        { "eval": format!("[{at_answer}, {opposite}]") },
        { "eval": format!("show({{ ...state.answer, density: undefined }}); [{at_answer}, {opposite}, document.getElementById('legend').textContent]") },
        { "eval": format!("({colors})({places})") },
        { "eval": format!("{}.map((point) => [0, 3, 7].map((order) => cellOf(...point, order)))", json!(points)) },
    ]);
    let values = values(stage, service, &steps, 0).expect("there is a browser");
    for at in [0, 1] {
        let [near, far] = [0, 1].map(|part| values[at][part].as_f64().unwrap_or(f64::NAN));
        assert!(near > 0.1 && near < 0.71 && far >= 0.0 && far < 0.5 * near, "{}", values[at]);
    }
    assert!(values[1][2].as_str().is_some_and(|text| text.contains("smoothed over 250 km")), "{}", values[1]);
    assert_eq!(values[2], json!(wanted));
    let cells = |point| [0, 3, 7].map(|order| Healpix::new(order).cell_of(point));
    let wanted: Vec<[u64; 3]> = fibonacci_grid(400).into_iter().map(cells).collect();
    assert_eq!(values[3], json!(wanted), "the page numbers cells differently");
}
