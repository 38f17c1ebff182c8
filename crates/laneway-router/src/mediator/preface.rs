//! How many requests a target takes at once over a connection of HTTP/2: it says so in its first frame, which is read along here.
//!
//! What goes beyond that waits inside the connection, where nobody sees it while the time of its call runs. So `connections.rs` has to know before it sends anything, and
//! hyper does not tell: it knows, and keeps to it. A target that changes its mind later is not heard here.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use tokio::sync::oneshot;

/// So much is looked at in one read until the first frame is there; it rarely has more than fifty bytes.
const LOOK_BYTES: usize = 1_024;

/// Length, kind, flags and the number of a stream.
const HEAD_BYTES: usize = 9;

/// No first frame may be longer: that is what both sides start with.
const FRAME_BYTES_MAX: usize = 16 * 1024;

/// A stream whose other side says how many requests it takes.
pub(super) struct Overheard<S> {
    stream: S,
    /// What has come, until it is enough.
    preface: Option<Preface>,
}

struct Preface {
    bytes: Vec<u8>,
    tell: oneshot::Sender<usize>,
}

impl<S> Overheard<S> {
    /// The limit comes when the first frame has; an error instead if there will be none.
    pub(super) fn new(stream: S) -> (Self, oneshot::Receiver<usize>) {
        let (tell, told) = oneshot::channel();
        (Overheard { stream, preface: Some(Preface { bytes: Vec::new(), tell }) }, told)
    }

    fn hear(&mut self, bytes: &[u8]) {
        let Some(mut preface) = self.preface.take() else { return };
        preface.bytes.extend_from_slice(bytes);
        match limit(&preface.bytes) {
            Heard::Half => self.preface = Some(preface),
            // Whoever made the connection may have gone.
            Heard::Limit(limit) => drop(preface.tell.send(limit)),
            Heard::SomethingElse => {}
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Half,
    Limit(usize),
    /// Not what a target of HTTP/2 begins with; hyper will say so.
    SomethingElse,
}

/// What the first frame says of the number of streams (RFC 9113, 6.5.2).
fn limit(bytes: &[u8]) -> Heard {
    const SETTINGS: u8 = 4;
    const MAX_CONCURRENT_STREAMS: [u8; 2] = [0, 3];
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return Heard::Half };
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    if head[3] != SETTINGS || length > FRAME_BYTES_MAX {
        return Heard::SomethingElse;
    }
    let Some(settings) = rest.get(..length) else { return Heard::Half };
    // Of several the last one counts.
    let said = settings.chunks_exact(6).rfind(|setting| setting[..2] == MAX_CONCURRENT_STREAMS);
    let value = said.map(|setting| u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]));
    Heard::Limit(value.map_or(usize::MAX, |value| value as usize))
}

impl<S: Read + Unpin> Read for Overheard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.preface.is_none() {
            return Pin::new(&mut self.stream).poll_read(context, into);
        }
        let mut bytes = [0; LOOK_BYTES];
        let most = into.remaining().min(LOOK_BYTES);
        let mut read = ReadBuf::new(&mut bytes[..most]);
        ready!(Pin::new(&mut self.stream).poll_read(context, read.unfilled()))?;
        into.put_slice(read.filled());
        self.hear(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl<S: Write + Unpin> Write for Overheard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of this kind.
    fn frame(kind: u8, settings: &[(u8, u32)]) -> Vec<u8> {
        let mut bytes = vec![0, 0, settings.len() as u8 * 6, kind, 0, 0, 0, 0, 0];
        for (name, value) in settings {
            bytes.extend([0, *name]);
            bytes.extend(value.to_be_bytes());
        }
        bytes
    }

    #[test]
    fn the_first_frame_says_how_many_there_may_be_however_it_comes() {
        let told = frame(4, &[(4, 65_535), (3, 100), (1, 0)]);
        for end in 0..told.len() {
            assert_eq!(limit(&told[..end]), Heard::Half, "{end}");
        }
        assert_eq!(limit(&[&told[..], b"more"].concat()), Heard::Limit(100));
        assert_eq!(limit(&frame(4, &[])), Heard::Limit(usize::MAX), "no limit");
        assert_eq!(limit(&frame(6, &[])), Heard::SomethingElse);
        assert_eq!(limit(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Heard::SomethingElse);
    }

    #[test]
    fn who_waits_is_told_when_there_will_be_no_answer() {
        let (mut stream, mut told) = Overheard::new(());
        stream.hear(&frame(4, &[(3, 7)])[..12]);
        assert!(told.try_recv().is_err());
        stream.hear(&frame(4, &[(3, 7)])[12..]);
        assert_eq!(told.try_recv(), Ok(7));
        let (stream, told) = Overheard::new(());
        drop(stream);
        assert!(told.blocking_recv().is_err());
    }
}
