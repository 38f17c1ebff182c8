//! From bytes to lines: finds newlines in what the network hands over piece by piece, and lets no line grow beyond the limit.
//!
//! `connection.rs` pushes what it read and takes the lines out one by one. It is plain data, so that the fuzz test can call it: which lines come out
//! does not depend on how the bytes were cut.

/// The part of a connection's input that is not yet answered.
#[derive(Debug)]
pub struct Frames {
    buffer: Vec<u8>,
    /// Everything before it has been handed out.
    start: usize,
    /// From `start` to here there is no newline.
    scanned: usize,
    /// The longest line.
    limit: usize,
    /// The line that is coming was too long, has been handed out as such, and is passed over up to its newline.
    skipping: bool,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A line, without its newline (and without a carriage return before it).
    Line(&'a [u8]),
    /// A line that is longer than the limit, with as much of it as the limit allows. Told as soon as it is known; its bytes are not kept.
    TooLong(&'a [u8]),
}

/// What is left when there is no whole line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Nothing: the input ends with a newline.
    Nothing,
    /// The beginning of a line that nobody has heard of yet.
    Unanswered,
    /// The end of a line that was handed out as too long.
    Answered,
}

/// A buffer that grew for a long line gives its memory back down to this.
const KEPT: usize = 4 * 1024;

impl Frames {
    /// An empty input, whose lines have at most so many bytes.
    pub fn new(limit: usize) -> Self {
        Frames { buffer: Vec::new(), start: 0, scanned: 0, limit, skipping: false }
    }

    /// Appends what was read. To be called when [`next`](Frames::next) has nothing more: then at most one unfinished line is held.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        if self.buffer.is_empty() {
            self.buffer.shrink_to(KEPT);
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next line, if there is a whole one, or one that is already too long.
    #[expect(
        clippy::should_implement_trait,
        reason = "it lends a line from itself, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<Frame<'_>> {
        loop {
            let unseen = &self.buffer[self.scanned..];
            let Some(distance) = unseen.iter().position(|byte| *byte == b'\n') else {
                self.scanned = self.buffer.len();
                let from = self.start;
                return self
                    .too_long_already()
                    .then(|| Frame::TooLong(&self.buffer[from..from + self.limit]));
            };
            let (from, to) = (self.start, self.scanned + distance);
            (self.start, self.scanned) = (to + 1, to + 1);
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            if to - from > self.limit {
                return Some(Frame::TooLong(&self.buffer[from..from + self.limit]));
            }
            let line = &self.buffer[from..to];
            return Some(Frame::Line(line.strip_suffix(b"\r").unwrap_or(line)));
        }
    }

    /// Throws away what there is of a line that is or becomes too long. True if that is news.
    fn too_long_already(&mut self) -> bool {
        let news = !self.skipping && self.buffer.len() - self.start > self.limit;
        if self.skipping || news {
            self.skipping = true;
            self.start = self.buffer.len();
        }
        news
    }

    /// What is left when there is no whole line.
    pub fn rest(&self) -> Rest {
        match (self.skipping, self.start == self.buffer.len()) {
            (true, _) => Rest::Answered,
            (false, true) => Rest::Nothing,
            (false, false) => Rest::Unanswered,
        }
    }

    /// How many bytes are held: never more than the longest line and what was last pushed.
    pub fn held(&self) -> usize {
        self.buffer.len() - self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(frames: &mut Frames) -> Vec<String> {
        let mut seen = Vec::new();
        while let Some(frame) = frames.next() {
            seen.push(match frame {
                Frame::Line(line) => String::from_utf8(line.to_vec()).unwrap(),
                Frame::TooLong(beginning) => format!("{}…", String::from_utf8_lossy(beginning)),
            });
        }
        seen
    }

    #[test]
    fn lines_come_out_however_they_were_cut() {
        let input = b"one\r\n\ntwo\nthirteen bytes\nthree\nrest";
        for cut in 0..input.len() {
            let mut frames = Frames::new(8);
            let mut seen = Vec::new();
            for piece in [&input[..cut], &input[cut..]] {
                frames.push(piece);
                seen.extend(all(&mut frames));
            }
            assert_eq!(seen, ["one", "", "two", "thirteen…", "three"], "cut at {cut}");
            assert_eq!(frames.rest(), Rest::Unanswered);
        }
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_a_line() {
        let mut frames = Frames::new(4);
        frames.push(b"1234\n12345\n1234");
        assert_eq!(all(&mut frames), ["1234", "1234…"]);
        assert_eq!(frames.rest(), Rest::Unanswered, "four bytes may still become a line");
        frames.push(b"5");
        assert_eq!(all(&mut frames), ["1234…"], "told once, before its end");
        assert_eq!(frames.rest(), Rest::Answered);
        frames.push(b"678");
        assert_eq!(all(&mut frames), Vec::<String>::new());
        frames.push(b"\nok\n");
        assert_eq!(all(&mut frames), ["ok"]);
        assert_eq!(frames.rest(), Rest::Nothing);
    }

    #[test]
    fn a_line_without_end_is_not_kept() {
        let mut frames = Frames::new(1_000);
        for _ in 0..10_000 {
            frames.push(&[b'x'; 100]);
            all(&mut frames);
            assert!(frames.held() <= 1_100);
        }
        assert!(frames.buffer.capacity() < 8_192, "{}", frames.buffer.capacity());
    }
}
