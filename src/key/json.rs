//! Finds one value in a JSON body: in one pass, with no tree, no float and no deep recursion.
//!
//! The walk goes down where the path goes down. What is not on the way is skipped by serde_json,
//! which checks it without keeping it and without recursing, so the whole body is known to be JSON
//! when the walk is over.

use std::{collections::VecDeque, fmt};

use serde::{
    Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{
    fault::Problem,
    path::{Path, Step},
};

/// The text of the string, or the digits of the integer, that the path leads to.
pub(super) fn find(path: &Path, body: &[u8]) -> Result<String, Problem> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let text = std::str::from_utf8(body).map_err(|_| Problem::NotUtf8Json)?;
    if text.bytes().all(is_white_space) {
        return Err(Problem::EmptyBody);
    }
    let found = walk(text, path.steps())
        .map_err(|error| Problem::NotJson { line: error.line(), column: error.column() })?;
    key(found?.get())
}

/// What a value says of itself as a key. The value is valid JSON without white space around it.
fn key(value: &str) -> Result<String, Problem> {
    match value.bytes().next() {
        // The only fault that skipping a string does not find.
        Some(b'"') => serde_json::from_str(value).map_err(|_| Problem::LoneSurrogate),
        Some(b'n') => Err(Problem::Null),
        Some(b't' | b'f') => Err(Problem::Boolean),
        Some(b'{') => Err(Problem::Object),
        Some(b'[') => Err(Problem::Array),
        _ if value.contains(['.', 'e', 'E']) => Err(Problem::Fraction),
        _ => Ok(value.to_owned()),
    }
}

/// The value that the path leads to, or why it leads nowhere: [`Problem::NothingThere`] or
/// [`Problem::TwiceNamed`].
type Found<'de> = Result<&'de RawValue, Problem>;

/// Walks over the whole of a text, which must be one JSON document.
fn walk<'de>(text: &'de str, steps: &[Step]) -> serde_json::Result<Found<'de>> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = Walk { text, at: 0, steps }.deserialize(&mut json)?;
    json.end()?;
    Ok(found)
}

/// The walk from one value on.
struct Walk<'de, 'p> {
    text: &'de str,
    /// A byte of the text at or before the value; only white space and a `:` or `,` lie between.
    /// A visitor is not told the type of a value before it has read it, and a wrong guess ends the
    /// whole walk; the text tells.
    at: usize,
    /// The steps that are left.
    steps: &'p [Step],
}

impl Walk<'_, '_> {
    /// The byte that the value begins with, which tells its type, and where it is.
    fn begin(&self) -> Option<(usize, u8)> {
        let rest = self.text.get(self.at..)?;
        let is_value = |byte: u8| !is_white_space(byte) && !matches!(byte, b':' | b',');
        let (skipped, byte) = rest.bytes().enumerate().find(|(_, byte)| is_value(*byte))?;
        Some((self.at + skipped, byte))
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'de, '_> {
    type Value = Found<'de>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Found<'de>, D::Error> {
        let Self { text, steps, .. } = self;
        match (steps, self.begin()) {
            ([], _) => serde::Deserialize::deserialize(json).map(Ok),
            ([Step::Name(name), steps @ ..], Some((_, b'{'))) => {
                json.deserialize_map(InObject { text, name, steps })
            }
            ([Step::Index(index), steps @ ..], Some((_, b'['))) if *index < 0 => {
                json.deserialize_seq(FromEnd { back: index.unsigned_abs(), steps })
            }
            ([Step::Index(index), steps @ ..], Some((at, b'['))) => {
                let index = index.unsigned_abs();
                json.deserialize_seq(FromStart { text, at: at + 1, index, steps })
            }
            _ => json.deserialize_ignored_any(IgnoredAny).map(|_| Err(Problem::NothingThere)),
        }
    }
}

struct InObject<'de, 'p> {
    text: &'de str,
    name: &'p str,
    steps: &'p [Step],
}

impl<'de> Visitor<'de> for InObject<'de, '_> {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
        let Self { text, name, steps } = self;
        let mut found = None;
        let mut twice = false;
        while let Some(said) = map.next_key::<&'de RawValue>()? {
            if !is_name(said.get(), name) {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_none() {
                let at = end_in(text, said.get());
                found = Some(map.next_value_seed(Walk { text, at, steps })?);
            } else {
                twice = true;
                map.next_value::<IgnoredAny>()?;
            }
        }
        // Parsers disagree on which of two members counts. If we took one and the handler's parser
        // the other, an event could be swallowed under the id of another.
        if twice {
            return Ok(Err(Problem::TwiceNamed { name: name.to_owned() }));
        }
        Ok(found.unwrap_or(Err(Problem::NothingThere)))
    }
}

struct FromStart<'de, 'p> {
    text: &'de str,
    at: usize,
    index: u64,
    steps: &'p [Step],
}

impl<'de> Visitor<'de> for FromStart<'de, '_> {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Found<'de>, A::Error> {
        let Self { text, mut at, index, steps } = self;
        for _ in 0..index {
            match seq.next_element::<&'de RawValue>()? {
                Some(element) => at = end_in(text, element.get()),
                None => return Ok(Err(Problem::NothingThere)),
            }
        }
        let found = seq.next_element_seed(Walk { text, at, steps })?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(found.unwrap_or(Err(Problem::NothingThere)))
    }
}

struct FromEnd<'p> {
    back: u64,
    steps: &'p [Step],
}

impl<'de> Visitor<'de> for FromEnd<'_> {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Found<'de>, A::Error> {
        // The last elements so far, at most `back` of them.
        let mut last = VecDeque::new();
        let mut seen: u64 = 0;
        while let Some(element) = seq.next_element::<&'de RawValue>()? {
            if seen >= self.back {
                last.pop_front();
            }
            last.push_back(element);
            seen += 1;
        }
        match last.pop_front() {
            // Only now is it known which element it is; it is walked over a second time.
            Some(element) if seen >= self.back => {
                walk(element.get(), self.steps).map_err(A::Error::custom)
            }
            _ => Ok(Err(Problem::NothingThere)),
        }
    }
}

/// Whether a JSON string, in its quotes, says this name. One with half a surrogate pair says none.
fn is_name(raw: &str, name: &str) -> bool {
    if raw.contains('\\') {
        return serde_json::from_str::<String>(raw).is_ok_and(|said| said == name);
    }
    raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"')) == Some(name)
}

/// Where a part that was borrowed from a text ends in it.
fn end_in(text: &str, part: &str) -> usize {
    part.as_ptr().addr().saturating_sub(text.as_ptr().addr()) + part.len()
}

fn is_white_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use proptest::prelude::*;

    use super::*;

    fn find(path: &str, body: impl AsRef<[u8]>) -> Result<String, Problem> {
        super::find(&Path::parse(path).unwrap(), body.as_ref())
    }

    fn found(path: &str, body: impl AsRef<[u8]>) -> String {
        find(path, body).unwrap()
    }

    #[test]
    fn strings_are_decoded_and_integers_are_their_digits() {
        for (path, body, key) in [
            ("$.id", r#"{"id":"evt_1"}"#, "evt_1"),
            ("$.id", r#"{"a":[{"id":2}],"id":"1","b":{"id":3}}"#, "1"),
            ("$.id", r#"{"id":1}"#, "1"),
            ("$.id", r#"{"id":9007199254740993}"#, "9007199254740993"),
            ("$.id", r#"{"id":12345678901234567890123}"#, "12345678901234567890123"),
            ("$.id", r#"{"id":-7}"#, "-7"),
            ("$.id", r#"{"id":-0}"#, "-0"),
            ("$.id", r#"{"id":"a\u0041\n\"\ud83d\ude00"}"#, "aA\n\"😀"),
            ("$.id", "\t{\r\n \"id\" :\n 1 } ", "1"),
            ("$", "\"whole\"", "whole"),
            ("$", " 12 ", "12"),
            ("$[0]", "[1,2,3]", "1"),
            ("$[2]", "[1,2,3]", "3"),
            ("$[-1]", "[1,2,3]", "3"),
            ("$[-3]", "[1,2,3]", "1"),
            ("$['odd key'][0].id", r#"{"odd key":[{"id":"x"}]}"#, "x"),
            ("$['']", r#"{"":"x"}"#, "x"),
            ("$[-1][-1].a", r#"[[],[0,{"a":"x"}]]"#, "x"),
            // Names are compared as what they say.
            ("$.id", r#"{"\u0069\u0064":"x"}"#, "x"),
            (r"$['\u0069d']", r#"{"id":"x"}"#, "x"),
            (r"$['\ud83d\ude00']", r#"{"😀":"x"}"#, "x"),
            ("$.é", r#"{"\u00e9":"x"}"#, "x"),
            // A name that is no text is nobody's name; a number of any size may stand elsewhere.
            ("$.id", r#"{"\ud800":1,"id":"x","n":1e99999}"#, "x"),
        ] {
            assert_eq!(found(path, body), key, "{path} {body}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped_once() {
        assert_eq!(found("$.id", "\u{feff}{\"id\":1}"), "1");
        assert!(matches!(find("$.id", "\u{feff}\u{feff}{\"id\":1}"), Err(Problem::NotJson { .. })));
        assert_eq!(find("$.id", "\u{feff}"), Err(Problem::EmptyBody));
    }

    #[test]
    fn a_path_that_leads_nowhere_finds_nothing() {
        for (path, body) in [
            ("$.id", "{}"),
            ("$.id", "[]"),
            ("$.id", "1"),
            ("$.id", r#"{"ID":1}"#),
            ("$.id", r#"{"a":{"id":1}}"#),
            ("$.a.b", r#"{"a":"b"}"#),
            ("$.a.b", r#"{"a":1e999}"#),
            ("$.a.b", r#"{"a":"\ud800"}"#),
            ("$.a.b", r#"{"a":null}"#),
            ("$[0]", "[]"),
            ("$[0]", r#"{"0":1}"#),
            ("$['0']", "[1]"),
            ("$[3]", "[1,2,3]"),
            ("$[-4]", "[1,2,3]"),
            ("$[9007199254740991]", "[1]"),
            ("$[-9007199254740991]", "[1]"),
        ] {
            assert_eq!(find(path, body), Err(Problem::NothingThere), "{path} {body}");
        }
    }

    #[test]
    fn a_body_that_is_not_one_json_document_has_no_key() {
        for body in [
            "id=1",
            r#"{"id":1"#,
            r#"{"id":1}}"#,
            r#"{"id":1} x"#,
            r#"{"id":1}{"id":1}"#,
            r#"{"id":1,}"#,
            "[1] x",
            "[1][1]",
            "[1]]",
            "1 1",
            r#"{id:1}"#,
            r#"{"id":01}"#,
            r#"{"id":1,"a":[1,2}"#,
            r#"{"id":1,"a":"\x"}"#,
            r#"{"id":1,"a":tru}"#,
            "{\"id\":1,\"a\":\"\u{1}\"}",
            "[1,",
            "\"",
            "nul",
        ] {
            for path in ["$.id", "$", "$[0]", "$[-1]", "$.id.id"] {
                let found = find(path, body);
                assert!(matches!(found, Err(Problem::NotJson { .. })), "{path} {body}: {found:?}");
            }
        }
        assert_eq!(find("$.id", b"{\"id\":1,\"a\":\"\xff\"}"), Err(Problem::NotUtf8Json));
        for body in ["", " ", "\r\n\t "] {
            assert_eq!(find("$.id", body), Err(Problem::EmptyBody));
            assert_eq!(find("$", body), Err(Problem::EmptyBody));
        }
    }

    #[test]
    fn a_name_twice_on_the_way_is_refused_and_elsewhere_is_nobodys_business() {
        for (path, body, name) in [
            ("$.id", r#"{"id":"a","id":"b"}"#, "id"),
            ("$.id", r#"{"id":"a","id":"a"}"#, "id"),
            ("$.id", r#"{"id":null,"id":"a"}"#, "id"),
            ("$.id", r#"{"\u0069d":"a","id":"b"}"#, "id"),
            ("$.a.id", r#"{"a":{"id":1},"b":0,"a":{}}"#, "a"),
            ("$.a.id", r#"{"a":{"id":1,"id":1}}"#, "id"),
            ("$[0].id", r#"[{"id":1,"id":2}]"#, "id"),
            ("$[-1].id", r#"[{"id":1,"id":2}]"#, "id"),
        ] {
            let twice = Problem::TwiceNamed { name: name.to_owned() };
            assert_eq!(find(path, body), Err(twice), "{path} {body}");
        }
        for body in [
            r#"{"id":"x","a":1,"a":2}"#,
            r#"{"id":"x","a":{"id":1,"id":2}}"#,
            r#"{"id":"x","\ud800":1,"\ud800":2}"#,
        ] {
            assert_eq!(found("$.id", body), "x", "{body}");
        }
        // What is no JSON is no JSON, whatever it names twice.
        assert!(matches!(find("$.id", r#"{"id":1,"id":2"#), Err(Problem::NotJson { .. })));
    }

    #[test]
    fn half_a_surrogate_pair_is_no_key() {
        for body in [r#""\ud800""#, r#""\udc00""#, r#""a\ud800b""#, r#""\ud800\u0041""#] {
            assert_eq!(find("$", body), Err(Problem::LoneSurrogate), "{body}");
        }
    }

    #[test]
    fn a_fraction_is_no_key_even_if_it_is_whole() {
        for body in ["1.0", "1e3", "1E3", "-1.5", "0e0", "1e-7"] {
            assert_eq!(find("$", body), Err(Problem::Fraction), "{body}");
        }
    }

    #[test]
    fn deep_nesting_costs_no_stack() {
        const DEEP: usize = 100_000;
        // A quarter of what a worker thread of tokio has.
        let small = std::thread::Builder::new().stack_size(512 * 1024);
        let all = small.spawn(|| {
            let deep = format!("{}{}", "[".repeat(DEEP), "]".repeat(DEEP));
            let objects = format!("{}1{}", r#"{"a":"#.repeat(DEEP), "}".repeat(DEEP));
            assert_eq!(found("$.id", format!(r#"{{"a":{deep},"id":"x"}}"#)), "x");
            assert_eq!(found("$[-1]", format!("[{deep},1]")), "1");
            assert_eq!(find("$[0][-1][0]", &deep), Err(Problem::Array));
            assert_eq!(find("$.a.a.a", &objects), Err(Problem::Object));
            assert_eq!(find("$", &objects), Err(Problem::Object));
            assert!(matches!(find("$[0]", "[".repeat(DEEP)), Err(Problem::NotJson { .. })));
            let way = format!("${}", ".a".repeat(32));
            assert_eq!(find(&way, &objects), Err(Problem::Object));
        });
        all.unwrap().join().unwrap();
    }

    /// A document as it was written, so that the oracle need not read it.
    #[derive(Clone, Debug)]
    enum Doc {
        /// A text that is a key as it stands in the body, what it says, or why it is none.
        Leaf(String, Result<String, Problem>),
        Array(Vec<Doc>),
        Object(Vec<(String, Doc)>),
    }

    impl Doc {
        fn write(&self, out: &mut String) {
            match self {
                Self::Leaf(raw, _) => out.push_str(raw),
                Self::Array(elements) => {
                    out.push('[');
                    for (at, element) in elements.iter().enumerate() {
                        out.push_str(if at > 0 { " ,\n" } else { " " });
                        element.write(out);
                    }
                    out.push(']');
                }
                Self::Object(members) => {
                    out.push('{');
                    for (at, (name, value)) in members.iter().enumerate() {
                        out.push_str(if at > 0 { "," } else { "\t" });
                        out.push_str(&written(name, at % 2 == 1));
                        out.push_str(" : ");
                        value.write(out);
                    }
                    out.push_str(" }");
                }
            }
        }

        fn find(&self, steps: &[Step]) -> Result<String, Problem> {
            match (self, steps) {
                (Self::Leaf(_, key), []) => key.clone(),
                (Self::Array(_), []) => Err(Problem::Array),
                (Self::Object(_), []) => Err(Problem::Object),
                (Self::Array(elements), [Step::Index(index), rest @ ..]) => {
                    let count = i64::try_from(elements.len()).unwrap();
                    let at = if *index < 0 { count + index } else { *index };
                    let element = usize::try_from(at).ok().and_then(|at| elements.get(at));
                    element.map_or(Err(Problem::NothingThere), |element| element.find(rest))
                }
                (Self::Object(members), [Step::Name(name), rest @ ..]) => {
                    let mut named = members.iter().filter(|(said, _)| said == name);
                    match (named.next(), named.next()) {
                        (None, _) => Err(Problem::NothingThere),
                        (Some((_, value)), None) => value.find(rest),
                        _ => Err(Problem::TwiceNamed { name: name.clone() }),
                    }
                }
                _ => Err(Problem::NothingThere),
            }
        }
    }

    /// A text as a JSON string, with each UTF-16 unit escaped or not.
    fn written(text: &str, escaped: bool) -> String {
        if escaped {
            let units = text.encode_utf16().map(|unit| format!("\\u{unit:04X}"));
            format!("\"{}\"", units.collect::<String>())
        } else {
            serde_json::to_string(text).unwrap()
        }
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof![4 => "[abc]", 1 => "[é😀\"\\\\\n ]{0,2}"]
    }

    fn docs() -> impl Strategy<Value = Doc> {
        let leaf = prop_oneof![
            (any::<String>(), any::<bool>())
                .prop_map(|(text, escaped)| Doc::Leaf(written(&text, escaped), Ok(text))),
            "-?(0|[1-9][0-9]{0,30})".prop_map(|digits| Doc::Leaf(digits.clone(), Ok(digits))),
            "-?(0|[1-9][0-9]{0,3})(\\.[0-9]{1,3}|[eE][+-]?[0-9]{1,4})"
                .prop_map(|raw| Doc::Leaf(raw, Err(Problem::Fraction))),
            "(true|false)".prop_map(|raw| Doc::Leaf(raw, Err(Problem::Boolean))),
            Just(Doc::Leaf("null".to_owned(), Err(Problem::Null))),
        ];
        leaf.prop_recursive(4, 40, 5, |doc| {
            prop_oneof![
                prop::collection::vec(doc.clone(), 0..5).prop_map(Doc::Array),
                prop::collection::vec((names(), doc), 0..5).prop_map(Doc::Object),
            ]
        })
    }

    fn paths() -> impl Strategy<Value = Path> {
        let step = prop_oneof![names().prop_map(Step::Name), (-4..4_i64).prop_map(Step::Index)];
        prop::collection::vec(step, 0..5).prop_map(Path::of)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn what_is_found_is_what_was_written(doc in docs(), path in paths()) {
            let mut body = String::new();
            doc.write(&mut body);
            prop_assert_eq!(super::find(&path, body.as_bytes()), doc.find(path.steps()));

            // A second opinion from a parser that builds the tree. It rounds numbers, keeps the
            // last of two members, and refuses numbers out of range; strings it has right.
            if let Ok(tree) = serde_json::from_str::<serde_json::Value>(&body) {
                let leaf = path.steps().iter().try_fold(&tree, |value, step| match step {
                    Step::Name(name) => value.get(name),
                    Step::Index(index) if *index < 0 => {
                        let array = value.as_array()?;
                        array.get(array.len().checked_sub(usize::try_from(-index).ok()?)?)
                    }
                    Step::Index(index) => value.get(usize::try_from(*index).ok()?),
                });
                match super::find(&path, body.as_bytes()) {
                    Ok(key) => match leaf {
                        Some(serde_json::Value::String(text)) => prop_assert_eq!(&key, text),
                        Some(serde_json::Value::Number(number)) => {
                            let exact = number.is_i64() || number.is_u64();
                            prop_assert!(!exact || key == number.to_string(), "{} {}", key, number);
                        }
                        other => prop_assert!(false, "{} but {:?}", key, other),
                    },
                    Err(Problem::NothingThere) => prop_assert!(leaf.is_none(), "{:?}", leaf),
                    Err(_) => {}
                }
            }
        }
    }
}
