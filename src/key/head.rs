//! Keys in the head of a request: headers and the query.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};
use percent_encoding::percent_decode;

use super::fault::Problem;

/// The one value of a header, without the white space around it.
pub(super) fn header(name: &HeaderName, headers: &HeaderMap) -> Result<String, Problem> {
    let values = headers.get_all(name).iter().map(|value| trim(value.as_bytes()));
    let value = one(values)?;
    text(value.to_vec())
}

/// The one value of a parameter of the query, decoded.
pub(super) fn query(name: &str, query: Option<&str>) -> Result<String, Problem> {
    let parameters = query.unwrap_or_default().as_bytes().split(|byte| *byte == b'&');
    let values = parameters.filter_map(|parameter| {
        let mut halves = parameter.splitn(2, |byte| *byte == b'=');
        let is_it = decoded(halves.next()?) == name.as_bytes();
        is_it.then(|| decoded(halves.next().unwrap_or_default()))
    });
    let value = one(values)?;
    text(value.into_owned())
}

/// What all agree on. A source that says two things says nothing that is safe to use: the sender
/// or something on the way is confused, and the next attempt may have them in another order.
pub(super) fn one<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Result<T, Problem> {
    let first = values.next().ok_or(Problem::Absent)?;
    if values.all(|value| value == first) { Ok(first) } else { Err(Problem::TwoValues) }
}

fn text(value: Vec<u8>) -> Result<String, Problem> {
    String::from_utf8(value).map_err(|_| Problem::NotUtf8)
}

/// Without spaces and tabs, the white space of RFC 9110, at either end.
pub(super) fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// Decodes a name or a value as forms do: `+` is a space, `%41` is `A`, and a `%` that begins no
/// escape is itself. That is what the URL standard says and handlers' parsers do, so the key is
/// what the handler sees; refusing it would lose the event. Nothing is replaced: bytes that are no
/// UTF-8 stay what they are.
fn decoded(part: &[u8]) -> Cow<'_, [u8]> {
    if !part.iter().any(|byte| matches!(byte, b'+' | b'%')) {
        return Cow::Borrowed(part);
    }
    let spaced: Vec<u8> =
        part.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
    Cow::Owned(percent_decode(&spaced).collect())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use http::HeaderValue;

    use super::*;

    fn in_headers(values: &[&[u8]]) -> Result<String, Problem> {
        let name = HeaderName::from_static("x-id");
        let mut headers = HeaderMap::new();
        headers.insert("x-other", HeaderValue::from_static("no"));
        for value in values {
            headers.append(&name, HeaderValue::from_bytes(value).unwrap());
        }
        header(&name, &headers)
    }

    #[test]
    fn a_header_is_trimmed_and_must_not_contradict_itself() {
        assert_eq!(in_headers(&[]), Err(Problem::Absent));
        assert_eq!(in_headers(&[b" \t evt 1\t "]), Ok("evt 1".to_owned()));
        assert_eq!(in_headers(&[b"a", b" a "]), Ok("a".to_owned()));
        assert_eq!(in_headers(&[b"a", b"b"]), Err(Problem::TwoValues));
        assert_eq!(in_headers(&[b"a", b"A"]), Err(Problem::TwoValues));
        // `find` makes an empty text a missing key; next to another value it is a contradiction.
        assert_eq!(in_headers(&[b" ", b""]), Ok(String::new()));
        assert_eq!(in_headers(&[b"", b"b"]), Err(Problem::TwoValues));
        assert_eq!(in_headers(&["é".as_bytes()]), Ok("é".to_owned()));
        assert_eq!(in_headers(&[b"\xe9"]), Err(Problem::NotUtf8));
        // Only SP and HTAB are white space of HTTP.
        assert_eq!(in_headers(&["\u{a0}x".as_bytes()]), Ok("\u{a0}x".to_owned()));
    }

    #[test]
    fn a_query_is_decoded_without_loss() {
        for (text, found) in [
            (None, Err(Problem::Absent)),
            (Some(""), Err(Problem::Absent)),
            (Some("other=1"), Err(Problem::Absent)),
            (Some("Id=1"), Err(Problem::Absent)),
            (Some("id"), Ok("")),
            (Some("id="), Ok("")),
            (Some("id=&id"), Ok("")),
            (Some("id=1"), Ok("1")),
            (Some("a=b&&id=1&=&id=1"), Ok("1")),
            (Some("id=1&id=2"), Err(Problem::TwoValues)),
            (Some("id=1&id="), Err(Problem::TwoValues)),
            (Some("%69d=1&id=%31"), Ok("1")),
            (Some("%69d=1"), Ok("1")),
            (Some("%69d=1&id=2"), Err(Problem::TwoValues)),
            (Some("id=a=b"), Ok("a=b")),
            (Some("id=a+b%2B%26"), Ok("a b+&")),
            (Some("id=100%"), Ok("100%")),
            (Some("id=%zz%4"), Ok("%zz%4")),
            (Some("id=%C3%A9"), Ok("é")),
            (Some("id=%C3"), Err(Problem::NotUtf8)),
            (Some("%C3=1&id=x"), Ok("x")),
            // Two that a lossy decoder would call equal.
            (Some("id=%C3&id=%C4"), Err(Problem::TwoValues)),
        ] {
            assert_eq!(query("id", text), found.map(str::to_owned), "{text:?}");
        }
    }
}
