//! Finds one value in a JSON body: no tree, no float, no recursion.
//!
//! Each step of the path reads its object or array once, shallowly: what is not on the way is
//! skipped by serde_json, which checks it without keeping it and without recursing. The first step
//! reads the whole body, so the later ones read what is known to be JSON.

use std::{collections::VecDeque, fmt};

use serde::{
    Deserializer as _,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
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
    let mut value = text;
    for (depth, step) in path.steps().iter().enumerate() {
        let wanted = match step {
            Step::Name(_) => b'{',
            Step::Index(_) => b'[',
        };
        if kind(value) != Some(wanted) {
            if depth == 0 {
                whole(text)?;
            }
            return Err(Problem::NothingThere);
        }
        let found = match step {
            Step::Name(name) => member(value, name)?,
            Step::Index(index) => element(value, *index)?,
        };
        value = found.ok_or(Problem::NothingThere)?.get();
    }
    if path.steps().is_empty() {
        value = whole(text)?.get();
    }
    key(value)
}

/// What a value says of itself as a key. The value is valid JSON without white space around it.
fn key(value: &str) -> Result<String, Problem> {
    match kind(value) {
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

/// The byte that a value begins with, which tells its type.
fn kind(value: &str) -> Option<u8> {
    value.bytes().find(|byte| !is_white_space(*byte))
}

fn is_white_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

fn whole(text: &str) -> Result<&RawValue, Problem> {
    serde_json::from_str(text).map_err(not_json)
}

fn not_json(error: serde_json::Error) -> Problem {
    Problem::NotJson { line: error.line(), column: error.column() }
}

/// The member of that name of the object that `text` is.
fn member<'a>(text: &'a str, name: &str) -> Result<Option<&'a RawValue>, Problem> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = json.deserialize_map(Member { name }).and_then(|found| json.end().map(|()| found));
    let (found, twice) = found.map_err(not_json)?;
    // Parsers disagree on which of two members counts. If we took one and the handler's parser
    // the other, an event could be swallowed under the id of another.
    if twice { Err(Problem::TwiceNamed { name: name.to_owned() }) } else { Ok(found) }
}

/// The element at that index, from the end if it is negative, of the array that `text` is.
fn element(text: &str, index: i64) -> Result<Option<&RawValue>, Problem> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = if index < 0 {
        json.deserialize_seq(FromEnd { back: index.unsigned_abs(), last: VecDeque::new() })
    } else {
        json.deserialize_seq(FromStart { index: index.unsigned_abs() })
    };
    found.and_then(|found| json.end().map(|()| found)).map_err(not_json)
}

struct Member<'n> {
    name: &'n str,
}

impl<'de> Visitor<'de> for Member<'_> {
    /// The last member of the name, and whether there was one before.
    type Value = (Option<&'de RawValue>, bool);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        let mut twice = false;
        while let Some(name) = map.next_key::<&RawValue>()? {
            if is_name(name.get(), self.name) {
                twice |= found.replace(map.next_value()?).is_some();
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok((found, twice))
    }
}

/// Whether a JSON string, in its quotes, says this name. One with half a surrogate pair says none.
fn is_name(raw: &str, name: &str) -> bool {
    if raw.contains('\\') {
        return serde_json::from_str::<String>(raw).is_ok_and(|said| said == name);
    }
    raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"')) == Some(name)
}

struct FromStart {
    index: u64,
}

impl<'de> Visitor<'de> for FromStart {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        for _ in 0..self.index {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Ok(None);
            }
        }
        let found = seq.next_element()?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(found)
    }
}

struct FromEnd<'de> {
    back: u64,
    /// The last elements so far, at most `back` of them.
    last: VecDeque<&'de RawValue>,
}

impl<'de> Visitor<'de> for FromEnd<'de> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut seen: u64 = 0;
        while let Some(element) = seq.next_element()? {
            if seen >= self.back {
                self.last.pop_front();
            }
            self.last.push_back(element);
            seen += 1;
        }
        Ok(if seen < self.back { None } else { self.last.pop_front() })
    }
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
