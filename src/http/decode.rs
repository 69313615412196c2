//! Looking into compressed bodies. What is handed on stays as it was sent.

use std::borrow::Cow;
#[cfg(feature = "decode")]
use std::io;

use http::{HeaderMap, header::CONTENT_ENCODING};

use super::answer::Refusal;

/// The body without its content codings, at most `limit` bytes of it.
pub(super) fn for_looking<'a>(
    headers: &HeaderMap,
    data: &'a [u8],
    limit: usize,
) -> Result<Cow<'a, [u8]>, Refusal> {
    let mut body = Cow::Borrowed(data);
    if data.is_empty() {
        return Ok(body);
    }
    let codings = codings(headers)?;
    if codings.len() > MAX_CODINGS {
        return Err(Refusal::Encoding(format!("more than {MAX_CODINGS} content codings")));
    }
    // They were applied in the order in which they are listed.
    for coding in codings.iter().rev() {
        body = Cow::Owned(decoded(coding, &body, limit)?);
    }
    Ok(body)
}

/// The content codings of a body, in lower case, in the order in which they were applied.
fn codings(headers: &HeaderMap) -> Result<Vec<String>, Refusal> {
    let mut codings = Vec::new();
    for value in headers.get_all(CONTENT_ENCODING) {
        let value = value
            .to_str()
            .map_err(|_| Refusal::Encoding("content-encoding is not ASCII text".into()))?;
        let named = value.split(',').map(|coding| coding.trim().to_ascii_lowercase());
        codings.extend(named.filter(|coding| !coding.is_empty() && coding != "identity"));
    }
    Ok(codings)
}

#[cfg(feature = "decode")]
fn decoded(coding: &str, data: &[u8], limit: usize) -> Result<Vec<u8>, Refusal> {
    use std::io::Read;

    let mut plain = Vec::new();
    let most = limit as u64 + 1;
    let read = match coding {
        "gzip" | "x-gzip" => gzip(data, most, &mut plain),
        // RFC 9110 says zlib; some senders send the bare deflate stream.
        "deflate" if looks_like_zlib(data) => {
            flate2::read::ZlibDecoder::new(data).take(most).read_to_end(&mut plain).map(drop)
        }
        "deflate" => {
            flate2::read::DeflateDecoder::new(data).take(most).read_to_end(&mut plain).map(drop)
        }
        "br" if has_a_large_window(data) => Err(too_large_a_window()),
        "br" => brotli_decompressor::Decompressor::new(data, BROTLI_BUFFER)
            .take(most)
            .read_to_end(&mut plain)
            .map(drop),
        "zstd" => zstd(data, most, &mut plain),
        _ => return Err(not_supported(coding)),
    };
    match read {
        Err(_) => Err(Refusal::InvalidKey(format!("the body does not decode as {coding}"))),
        Ok(()) if plain.len() > limit => Err(Refusal::BodyTooLarge { limit }),
        Ok(()) => Ok(plain),
    }
}

#[cfg(not(feature = "decode"))]
fn decoded(coding: &str, _: &[u8], _: usize) -> Result<Vec<u8>, Refusal> {
    Err(not_supported(coding))
}

fn not_supported(coding: &str) -> Refusal {
    Refusal::Encoding(format!(
        "content-encoding {coding:?} cannot be looked into to find the event key; \
         send the body as it is{}",
        if cfg!(feature = "decode") { ", or as gzip, deflate, br or zstd" } else { "" },
    ))
}

/// Decodes all members, and takes the zeros that some writers pad the last one with.
#[cfg(feature = "decode")]
fn gzip(mut data: &[u8], most: u64, plain: &mut Vec<u8>) -> io::Result<()> {
    use std::io::Read;

    loop {
        let mut member = flate2::bufread::GzDecoder::new(data);
        (&mut member).take(most - plain.len() as u64).read_to_end(plain)?;
        data = member.into_inner();
        if plain.len() as u64 >= most || data.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
    }
}

/// Decodes all frames, and skips those that say so (RFC 8878).
#[cfg(feature = "decode")]
fn zstd(mut data: &[u8], most: u64, plain: &mut Vec<u8>) -> io::Result<()> {
    use std::io::{Error, Read};

    while !data.is_empty() && (plain.len() as u64) < most {
        match ZstdFrame::at_the_start_of(data)? {
            ZstdFrame::Skippable { length } => {
                data = data.get(length..).ok_or(io::ErrorKind::UnexpectedEof)?;
            }
            ZstdFrame::Data { window } if window > most.max(MAX_ZSTD_WINDOW) => {
                return Err(too_large_a_window());
            }
            ZstdFrame::Data { .. } => {
                let frame =
                    ruzstd::decoding::StreamingDecoder::new(&mut data).map_err(Error::other)?;
                frame.take(most - plain.len() as u64).read_to_end(plain)?;
            }
        }
    }
    Ok(())
}

/// What a zstd frame says of itself before anything is decoded.
#[cfg(feature = "decode")]
enum ZstdFrame {
    /// Nothing to decode in this many bytes.
    Skippable { length: usize },
    /// The decoder holds a window of this many bytes.
    Data { window: u64 },
}

#[cfg(feature = "decode")]
impl ZstdFrame {
    /// Reads magic number, descriptor and sizes (RFC 8878, section 3.1.1).
    fn at_the_start_of(data: &[u8]) -> io::Result<Self> {
        let (magic, data) = le(data, 4)?;
        if magic & 0xffff_fff0 == 0x184d_2a50 {
            let (length, _) = le(data, 4)?;
            let length = usize::try_from(length).ok().and_then(|length| length.checked_add(8));
            return Ok(Self::Skippable { length: length.ok_or(io::ErrorKind::UnexpectedEof)? });
        }
        if magic != 0xfd2f_b528 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (descriptor, data) = le(data, 1)?;
        let is_single_segment = descriptor & 0x20 != 0;
        let window = if is_single_segment {
            // The window is the whole content.
            let (_, data) = le(
                data,
                match descriptor & 3 {
                    3 => 4,
                    size => size as usize,
                },
            )?;
            match descriptor >> 6 {
                0 => le(data, 1)?.0,
                1 => le(data, 2)?.0 + 256,
                2 => le(data, 4)?.0,
                _ => le(data, 8)?.0,
            }
        } else {
            let (window, _) = le(data, 1)?;
            let base = 1_u64 << (10 + (window >> 3));
            base + base / 8 * (window & 7)
        };
        Ok(Self::Data { window })
    }
}

/// A little-endian number of up to 8 bytes, and what follows it.
#[cfg(feature = "decode")]
fn le(data: &[u8], bytes: usize) -> io::Result<(u64, &[u8])> {
    let (number, rest) = data.split_at_checked(bytes).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((number.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)), rest))
}

/// The "large window" extension of brotli, which is not the content coding of RFC 7932: its window
/// may have 1 GiB, and the decoder fills it before it gives anything.
#[cfg(feature = "decode")]
fn has_a_large_window(data: &[u8]) -> bool {
    data.first().is_some_and(|first| first & 0x7f == 0x11)
}

#[cfg(feature = "decode")]
fn too_large_a_window() -> io::Error {
    io::Error::other("the window is larger than content codings may have")
}

/// A zlib header says "deflate" in its first byte, and its first two are a multiple of 31.
#[cfg(feature = "decode")]
fn looks_like_zlib(data: &[u8]) -> bool {
    match data {
        [first, second, ..] => first & 0x0f == 8 && u16::from_be_bytes([*first, *second]) % 31 == 0,
        _ => false,
    }
}

const MAX_CODINGS: usize = 3;
#[cfg(feature = "decode")]
const BROTLI_BUFFER: usize = 4096;
/// What RFC 9659 allows zstd as a content coding.
#[cfg(feature = "decode")]
const MAX_ZSTD_WINDOW: u64 = 8 * 1024 * 1024;
