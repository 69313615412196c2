//! Keys in the header `Idempotency-Key`: the string of the IETF's draft, or the bare text that many
//! clients send.

use http::HeaderMap;

use super::{
    fault::Problem,
    head::{one, trim},
};

/// The one key in the header, without quotes and escapes.
pub(super) fn find(headers: &HeaderMap) -> Result<String, Problem> {
    let values = headers.get_all(NAME).iter().map(|value| key(trim(value.as_bytes())));
    // All are read first: a malformed one outranks two that differ.
    let keys: Option<Vec<String>> = values.collect();
    one(keys.ok_or(Problem::NoIdempotencyKey)?.into_iter())
}

/// The key in one value; `None` if it is malformed.
fn key(value: &[u8]) -> Option<String> {
    if value.starts_with(b"\"") {
        let (key, rest) = string(value)?;
        parameters(rest)?;
        return Some(key);
    }
    let is_whole = value.iter().all(is_bare);
    is_whole.then(|| value.iter().copied().map(char::from).collect())
}

/// Cuts a quoted string off: its content, and what comes after it.
fn string(text: &[u8]) -> Option<(String, &[u8])> {
    let mut content = String::new();
    let mut rest = text.strip_prefix(b"\"")?;
    loop {
        match rest {
            [b'"', rest @ ..] => return Some((content, rest)),
            [b'\\', byte @ (b'"' | b'\\'), after @ ..]
            | [byte @ (b' '..=b'[' | b']'..=b'~'), after @ ..] => {
                content.push(char::from(*byte));
                rest = after;
            }
            _ => return None,
        }
    }
}

/// Reads on to the end, over parameters such as `;a`, `; a=1` and `;a="b;c"`.
///
/// A name may have more characters, and a value more forms, than RFC 8941 has: nothing is made of
/// them, and a key is not refused for what does not matter to it.
fn parameters(mut rest: &[u8]) -> Option<()> {
    while !rest.is_empty() {
        let name = rest.strip_prefix(b";")?.trim_ascii_start();
        let after = cut(name, |byte| is_bare(byte) && *byte != b'=')?;
        rest = match after.strip_prefix(b"=") {
            None => after,
            Some(value) if value.starts_with(b"\"") => string(value)?.1,
            Some(value) => cut(value, is_bare)?,
        };
    }
    Some(())
}

/// What comes after a first part of such bytes, of which there is one at least.
fn cut(text: &[u8], is_part: impl Fn(&u8) -> bool) -> Option<&[u8]> {
    let end = text.iter().position(|byte| !is_part(byte)).unwrap_or(text.len());
    if end == 0 { None } else { text.get(end..) }
}

/// What stands for itself outside quotes. A `\` does not: where something on the way has taken the
/// quotes off, it is half of an escape, and taken as it is would make a second key of the event.
fn is_bare(byte: &u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b',' | b';' | b'\\')
}

/// The name of the header, and of the source in its text form.
pub(super) const NAME: &str = "idempotency-key";

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn in_headers(values: &[&[u8]]) -> Result<String, Problem> {
        let mut headers = HeaderMap::new();
        headers.insert("x-idempotency-key", HeaderValue::from_static("no"));
        for value in values {
            headers.append("Idempotency-Key", HeaderValue::from_bytes(value).unwrap());
        }
        find(&headers)
    }

    /// As RFC 8941 writes a string.
    fn quoted(key: &str) -> String {
        format!("\"{}\"", key.replace('\\', r"\\").replace('"', "\\\""))
    }

    #[test]
    fn quoted_and_bare_are_one_key() {
        for (value, key) in [
            (r#""8e03978e""#, "8e03978e"),
            ("8e03978e", "8e03978e"),
            (" \t\"8e03978e\"\t ", "8e03978e"),
            (" \t8e03978e ", "8e03978e"),
            ("", ""),
            (" ", ""),
            (r#""""#, ""),
            // What is quoted is not trimmed.
            (r#"" a b ""#, " a b "),
            (r#""a,b;c""#, "a,b;c"),
            (r#""a\"b\\c""#, r#"a"b\c"#),
            (r#""\\""#, r"\"),
            ("a=b", "a=b"),
            ("*:+/=(){}'~!", "*:+/=(){}'~!"),
            // Other items of RFC 8941 are bare texts.
            (":aGk=:", ":aGk=:"),
            ("?1", "?1"),
            ("4711", "4711"),
        ] {
            assert_eq!(in_headers(&[value.as_bytes()]).as_deref(), Ok(key), "{value}");
        }
    }

    #[test]
    fn parameters_are_read_over() {
        for parameters in [
            ";a",
            ";a=1",
            "; a=1",
            ";a;b=2;  c",
            r#";a="b;c""#,
            r#";a="\"";b=?1"#,
            ";a=:aGk=:",
            ";*a-b.c_d=1.5",
            ";A=1",
            ";a=b=c",
        ] {
            let value = format!("\"k\"{parameters}");
            assert_eq!(in_headers(&[value.as_bytes()]).as_deref(), Ok("k"), "{value}");
        }
        assert_eq!(in_headers(&[br#""";a=1"#]).as_deref(), Ok(""));
    }

    #[test]
    fn anything_else_is_malformed() {
        for value in [
            "\"",
            "\"a",
            r#""a\""#,
            r#""a\"#,
            r#""a\b""#,
            r#""a\u0041""#,
            r#""a"b"#,
            r#""a" b"#,
            r#""a""b""#,
            r#""a" ;b"#,
            r#""a";"#,
            r#""a";;b"#,
            r#""a";=1"#,
            r#""a";b="#,
            r#""a";b="c"#,
            r#""a";b="c"d"#,
            r#""a";b=c d"#,
            r#""a";b,"c""#,
            r#""a", "b""#,
            r#""a","a""#,
            r#"a"b""#,
            "a\"",
            "a,a",
            "a, b",
            ",",
            ";a=1",
            "a;b=1",
            "a b",
            "a\tb",
            "\"a\tb\"",
            r"a\b",
            r"\",
            r#"\"a\""#,
            "'a b'",
            "é",
            "\"é\"",
            "\"a\";b=é",
            "“a”",
        ] {
            let found = in_headers(&[value.as_bytes()]);
            assert_eq!(found, Err(Problem::NoIdempotencyKey), "{value}");
        }
        assert_eq!(in_headers(&[b"\"\xe9\""]), Err(Problem::NoIdempotencyKey));
    }

    #[test]
    fn a_header_that_comes_twice_must_not_contradict_itself() {
        assert_eq!(in_headers(&[]), Err(Problem::Absent));
        assert_eq!(in_headers(&[b"a", b"\"a\"", b" \"a\";b=1 "]).as_deref(), Ok("a"));
        assert_eq!(in_headers(&[b"", b"\"\""]).as_deref(), Ok(""));
        assert_eq!(in_headers(&[b"a", b"\"b\""]), Err(Problem::TwoValues));
        assert_eq!(in_headers(&[b"a", b"A"]), Err(Problem::TwoValues));
        assert_eq!(in_headers(&[b"a", b"\"\""]), Err(Problem::TwoValues));
        // A malformed one outranks two that differ, wherever it stands.
        assert_eq!(in_headers(&[b"a", b"b", b"\"c"]), Err(Problem::NoIdempotencyKey));
        assert_eq!(in_headers(&[b"\"c", b"a", b"b"]), Err(Problem::NoIdempotencyKey));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn what_is_quoted_is_found_again(key in "[ -~]{0,40}|[\"\\\\;, ]{0,9}") {
            prop_assert_eq!(in_headers(&[quoted(&key).as_bytes()]), Ok(key));
        }

        #[test]
        fn what_is_found_bare_is_found_quoted(value in "[ -~]{0,9}|[a\"\\\\;,=]{0,9}") {
            if let (false, Ok(key)) = (value.contains('"'), in_headers(&[value.as_bytes()])) {
                prop_assert_eq!(value.trim(), &key);
                prop_assert_eq!(in_headers(&[quoted(&key).as_bytes()]), Ok(key));
            }
        }

        #[test]
        fn whatever_comes_there_is_no_panic(
            value in prop::collection::vec(prop_oneof![Just(b'"'), Just(b'\\'), Just(b';'), 0x20..=0x7e_u8, 0x80..=0xff_u8], 0..12),
        ) {
            if let Ok(key) = in_headers(&[&value]) {
                prop_assert!(key.bytes().all(|byte| matches!(byte, b' '..=b'~')));
            }
        }
    }
}
