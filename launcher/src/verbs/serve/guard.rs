//! Decides who may ask. A page of another site must not reach the service through the browser of a user: so Host must be
//! an address of the service (which also stops DNS rebinding), and Origin, where given, must be the same.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use hyper::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use hyper::http::request::Parts;

use crate::cluster::Token;

/// Requests per second that a client address may send in the long run.
const RATE: f64 = 1000.0;
/// Requests that a client address may send at once.
const BURST: f64 = 2000.0;
/// Client addresses whose rates are known at a time.
const ADDRESSES_MAX: usize = 4096;
/// Fewest letters of a token.
pub(super) const TOKEN_LETTERS_MIN: usize = 16;

/// The token and the rates of all clients.
pub(super) struct Guard {
    token: Option<Token>,
    rates: Mutex<HashMap<IpAddr, Allowance>>,
}

/// How many requests a client may send at the time `at`.
#[derive(Clone, Copy)]
struct Allowance {
    requests: f64,
    at: Instant,
}

impl Allowance {
    fn at(self, now: Instant) -> f64 {
        (self.requests + now.saturating_duration_since(self.at).as_secs_f64() * RATE).min(BURST)
    }
}

impl Guard {
    pub(super) fn new(token: Option<Token>) -> Self {
        Self { token, rates: Mutex::default() }
    }

    /// Whether the request has the token, if one is needed.
    pub(super) fn has_token(&self, head: &Parts) -> bool {
        let Some(token) = &self.token else { return true };
        let given = head.headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        // The scheme is the same in upper and lower case (RFC 9110, section 11.1).
        let (scheme, rest) = given.split_at(given.len().min(7));
        scheme.eq_ignore_ascii_case(b"bearer ") && token.is_same(&Token::of(rest.trim_ascii()))
    }

    /// Counts a request of `client`. Returns false if the client sends too many.
    pub(super) fn allows(&self, client: IpAddr, now: Instant) -> bool {
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if rates.len() >= ADDRESSES_MAX && !rates.contains_key(&client) {
            rates.retain(|_, allowance| allowance.at(now) < BURST);
            if rates.len() >= ADDRESSES_MAX {
                return false;
            }
        }
        let allowance = rates.entry(client).or_insert(Allowance { requests: BURST, at: now });
        let requests = allowance.at(now);
        let is_allowed = requests >= 1.0;
        *allowance = Allowance { requests: if is_allowed { requests - 1.0 } else { requests }, at: now };
        is_allowed
    }
}

/// Checks Host and Origin of a request that arrived at the address `own`. The error says what is wrong.
pub(super) fn check_site(head: &Parts, own: SocketAddr) -> Result<(), String> {
    let host = only(head, &HOST)?.ok_or("the request has no Host header")?;
    let named = head.uri.authority().map_or(host, |authority| authority.as_str());
    if let Some(other) = [host, named].into_iter().find(|name| !is_own(name, own)) {
        return Err(format!("Host is {other:?}, wanted {}", own_names(own)));
    }
    match only(head, &ORIGIN)? {
        Some(origin) if !origin.eq_ignore_ascii_case(&format!("http://{host}")) => {
            Err(format!("Origin is {origin:?}, but Host is {host:?}: other sites may not use this service"))
        }
        _ => Ok(()),
    }
}

/// The value of a header that may be given once.
fn only<'a>(head: &'a Parts, name: &HeaderName) -> Result<Option<&'a str>, String> {
    let mut values = head.headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(format!("the request has several {name} headers"));
    }
    first.map(|value| value.to_str().map_err(|_| format!("the {name} header is not text"))).transpose()
}

fn own_names(own: SocketAddr) -> String {
    if own.ip().is_loopback() { format!("{own} or localhost:{}", own.port()) } else { own.to_string() }
}

/// Whether `host` names the address `own`.
fn is_own(host: &str, own: SocketAddr) -> bool {
    let ip = own.ip().to_canonical();
    if let Ok(address) = host.parse::<SocketAddr>() {
        let is_same = address.ip().to_canonical() == ip || ip.is_loopback() && address.ip().is_loopback();
        return is_same && address.port() == own.port();
    }
    let (name, port) = host.split_once(':').unwrap_or((host, "80"));
    let is_same = name.parse() == Ok(ip) || ip.is_loopback() && name.eq_ignore_ascii_case("localhost");
    is_same && port.parse() == Ok(own.port())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper::Request;

    use super::*;

    fn head(headers: &[(&str, &str)]) -> Parts {
        let request =
            headers.iter().fold(Request::builder().uri("/"), |request, (name, value)| request.header(*name, *value));
        request.body(()).expect("the headers are valid").into_parts().0
    }

    #[test]
    fn only_the_own_address_and_its_own_pages_are_accepted() {
        let own: SocketAddr = "127.0.0.1:8787".parse().expect("it is an address");
        for host in ["127.0.0.1:8787", "localhost:8787", "LOCALHOST:8787", "[::1]:8787"] {
            assert_eq!(check_site(&head(&[("host", host)]), own), Ok(()), "{host}");
            let origin = format!("http://{host}");
            assert_eq!(check_site(&head(&[("host", host), ("origin", &origin)]), own), Ok(()), "{host}");
        }
        for host in [
            "evil.com",
            "evil.com:8787",
            "localhost",
            "localhost:80",
            "127.0.0.1.evil.com:8787",
            "",
            "192.168.0.9:8787",
            "localhost:8787:1",
        ] {
            let error = check_site(&head(&[("host", host)]), own).expect_err(host);
            assert!(error.contains("wanted 127.0.0.1:8787 or localhost:8787"), "{error}");
        }
        for origin in
            ["null", "http://evil.com", "https://localhost:8787", "http://localhost:8788", "http://127.0.0.1:8787"]
        {
            assert!(check_site(&head(&[("host", "localhost:8787"), ("origin", origin)]), own).is_err(), "{origin}");
        }
        assert!(check_site(&head(&[]), own).is_err());
        assert!(check_site(&head(&[("host", "localhost:8787"), ("host", "evil.com")]), own).is_err());
        let public: SocketAddr = "[::ffff:10.0.0.5]:80".parse().expect("it is an address");
        assert_eq!(check_site(&head(&[("host", "10.0.0.5")]), public), Ok(()));
        assert!(check_site(&head(&[("host", "localhost")]), public).is_err());
    }

    #[test]
    fn token_must_be_the_same_to_the_last_letter() {
        let guard = Guard::new(Some(Token::of(b"0123456789abcdef")));
        for (value, is_right) in [
            ("Bearer 0123456789abcdef", true),
            ("bearer 0123456789abcdef", true),
            ("Bearer 0123456789abcdeg", false),
            ("Bearer 0123456789abcde", false),
            ("Bearer 0123456789abcdef0", false),
            ("Basic 0123456789abcdef", false),
            ("Bearer", false),
            ("", false),
        ] {
            assert_eq!(guard.has_token(&head(&[("authorization", value)])), is_right, "{value}");
        }
        assert!(!guard.has_token(&head(&[])) && Guard::new(None).has_token(&head(&[])));
    }

    #[test]
    fn client_that_sends_too_much_waits_and_others_do_not() {
        let (guard, now) = (Guard::new(None), Instant::now());
        let [one, other] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse::<IpAddr>().expect("it is an address"));
        let allowed = (0..3000).filter(|_| guard.allows(one, now)).count();
        assert_eq!(allowed as f64, BURST);
        assert!(guard.allows(other, now));
        assert!(guard.allows(one, now + Duration::from_micros(1500)) && !guard.allows(one, now));
    }

    #[test]
    fn number_of_known_addresses_is_limited() {
        let (guard, now) = (Guard::new(None), Instant::now());
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        assert!((0..ADDRESSES_MAX as u32).all(|number| guard.allows(address(number), now)));
        assert!(!guard.allows(address(u32::MAX), now));
        assert!(guard.allows(address(u32::MAX), now + Duration::from_secs(1)), "idle addresses are forgotten");
    }
}
