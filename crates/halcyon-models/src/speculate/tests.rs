use super::*;
use crate::sample::Sampling;

/// Logits that depend on the last token only. A step takes a given time for itself and for each row.
struct Table {
    logits: Vec<Vec<f32>>,
    tokens: Vec<u32>,
    context: usize,
    now: Instant,
    takes: [u64; 2],
    /// In place of a layer for further tokens, and the tokens that it holds.
    layer: Option<(Box<Table>, Vec<u32>)>,
}

fn step(proposed: usize, accepted: usize) -> Step {
    Step { sequences: 1, proposed, accepted }
}

impl Model for Table {
    fn length(&self) -> usize {
        self.tokens.len()
    }

    fn context(&self) -> usize {
        self.context
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn feed(&mut self, tokens: &[u32], all: bool) -> Result<Vec<f32>> {
        self.tokens.extend(tokens);
        self.now += Duration::from_millis(self.takes[0] + self.takes[1] * tokens.len() as u64);
        assert!(self.length() <= self.context());
        let rows = if all { tokens } else { &tokens[tokens.len() - 1..] };
        Ok(rows.iter().flat_map(|t| self.logits[*t as usize].clone()).collect())
    }

    fn truncate(&mut self, length: usize) {
        self.tokens.truncate(length);
    }

    fn ahead(&mut self, past: &[u32], n: usize, sampler: Sampler) -> Result<Vec<u32>> {
        let Some((layer, held)) = &mut self.layer else { return Ok(vec![]) };
        drafted(&mut **layer, held, past, n, sampler)
    }
}

const WORDS: usize = 5;

fn table(seed: u64) -> Table {
    let mut rng = halcyon_test::Rng::new(seed);
    let logits = (0..WORDS).map(|_| rng.f32s(WORDS).iter().map(|v| v * 3.0).collect()).collect();
    Table { logits, tokens: vec![], context: 12, now: Instant::now(), takes: [10, 1], layer: None }
}

/// Samplers of which each step changes something.
fn sampling(seed: u64) -> Sampling {
    Sampling {
        temperature: 1.0,
        top_k: 4,
        top_p: 0.97,
        min_p: 0.02,
        repeat_penalty: 1.2,
        presence_penalty: 0.1,
        repeat_last: 3,
        seed,
        ..Sampling::default()
    }
}

/// Proposals of a table in place of an engine.
fn generation(draft: Option<&mut Table>, target: &mut Table, sampling: Sampling, n: usize) -> Vec<u32> {
    let options = GenerateOptions { max_tokens: Some(n), sampling, ..GenerateOptions::default() };
    let Some(draft) = draft else { return generation_of(target, &options) };
    let mut session: Session<&Tokenizer> = Session::new(None, &[0], &options).unwrap();
    target.tokens.clear();
    let logits = target.feed(&[0], false).unwrap();
    let mut held = vec![];
    draft.tokens.clear();
    let mut piece = session.next(&logits, false).unwrap();
    let mut s = Speculation::lookup(SpeculationOptions { most: 3, always: true }).unwrap();
    while let Some(token) = piece.token.filter(|_| piece.finish.is_none()) {
        s.draft = match target.layer {
            Some(_) => Draft::Ahead,
            None => {
                let sampler = session.fork_sampler();
                let proposed = drafted(draft, &mut held, session.past(), 3, sampler).unwrap();
                assert_eq!(held, draft.tokens);
                Draft::Fixed(proposed)
            }
        };
        piece = s.round(target, 0, &mut session, token, &mut |_| true).unwrap().last.unwrap().unwrap();
    }
    session.tokens().to_vec()
}

#[test]
fn drafts_do_not_change_the_distribution() {
    let (mut target, draft) = (table(1), table(2));
    distribution(&mut target, draft);
    target.layer = Some((Box::new(table(2)), vec![]));
    // The draft is not asked.
    distribution(&mut target, table(3));
}

fn distribution(target: &mut Table, mut draft: Table) {
    let n = 20_000;
    let mut counts = [0usize; WORDS * WORDS];
    for seed in 0..n {
        let tokens = generation(Some(&mut draft), target, sampling(seed), 3);
        counts[tokens[1] as usize * WORDS + tokens[2] as usize] += 1;
    }
    // The exact probabilities of the second and third token.
    let mut want = [0f64; WORDS * WORDS];
    let mut sampler = Sampler::new(&sampling(0)).unwrap();
    let mut next =
        |past: &[u32]| sampler.distribution(&target.logits[past[past.len() - 1] as usize], past).unwrap();
    for (a, pa) in next(&[0]) {
        for (b, pb) in next(&[0, a]) {
            for (c, pc) in next(&[0, a, b]) {
                want[b as usize * WORDS + c as usize] += pa * pb * pc;
            }
        }
    }
    let (mut chi, mut cells) = (0.0, 0);
    for (count, p) in counts.iter().zip(&want) {
        match *p * n as f64 {
            e if e > 5.0 => {
                chi += (*count as f64 - e).powi(2) / e;
                cells += 1;
            }
            e => assert!(*count as f64 <= 5.0 * e + 10.0),
        }
    }
    assert!(cells > 10, "{cells}");
    // With 24 degrees of freedom, above 51.2 once in a thousand seeds.
    assert!(chi < 51.2, "{chi} in {cells} cells");
}

#[test]
fn drafts_do_not_change_the_tokens() {
    let mut target = table(1);
    for seed in 0..300 {
        let mut s = sampling(seed);
        if seed % 3 == 0 {
            s.temperature = 0.0;
        }
        // The second draft is the model itself; 20 tokens fill the context.
        for (mut draft, n) in [(table(2), 7), (table(1), 20)] {
            let want = generation(None, &mut target, s.clone(), n);
            assert_eq!(generation(Some(&mut draft), &mut target, s.clone(), n), want, "seed {seed}");
            assert_eq!(want.len(), n.min(12));
        }
    }
}

#[test]
fn a_lookup_finds_the_latest_longest_match() {
    assert_eq!(lookup(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2), [4, 8]);
    assert_eq!(lookup(&[5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 3), [3, 9, 1]);
    assert_eq!(lookup(&[7, 7, 7, 7], 3), [7]);
    assert!(lookup(&[1, 2, 3], 3).is_empty() && lookup(&[], 3).is_empty() && lookup(&[1], 3).is_empty());
}

/// A draft that is always wrong is asked less and less often, and its tokens are none of the text's.
#[test]
fn a_bad_draft_is_switched_off() {
    let mut target = table(1);
    (target.context, target.takes) = (2000, [10, 2]);
    let options = GenerateOptions {
        max_tokens: Some(1500),
        sampling: Sampling { seed: 3, temperature: 1.0, ..Sampling::default() },
        ..GenerateOptions::default()
    };
    let mut session: Session<&Tokenizer> = Session::new(None, &[0], &options).unwrap();
    let want = generation_of(&mut target, &options);
    target.tokens.clear();
    let logits = target.feed(&[0], false).unwrap();
    let mut s = Speculation::lookup(SpeculationOptions::default()).unwrap();
    let mut piece = session.next(&logits, false).unwrap();
    while let Some(token) = piece.token.filter(|_| piece.finish.is_none()) {
        // Any token but the next one.
        let wrong = want.get(session.tokens().len()).map_or(0, |t| (t + 1) % WORDS as u32);
        s.draft = Draft::Fixed(vec![wrong; 7]);
        piece = s.round(&mut target, 0, &mut session, token, &mut |_| true).unwrap().last.unwrap().unwrap();
    }
    assert_eq!(session.tokens(), want);
    let stats = s.stats();
    assert_eq!(stats.accepted, 0);
    // Attempts of 8 or 9 steps, with pauses of 16, 32, … 512 steps.
    assert!(stats.verified >= ROUNDS && stats.verified < 80, "{stats:?}");
    assert_eq!(stats.verified + stats.plain, 1499);
}

/// A text without proposals.
fn generation_of(target: &mut Table, options: &GenerateOptions) -> Vec<u32> {
    let mut session: Session<&Tokenizer> = Session::new(None, &[0], options).unwrap();
    target.tokens.clear();
    let mut logits = target.feed(&[0], false).unwrap();
    while let Some(token) = session.next(&logits, target.length() >= target.context()).unwrap().token {
        if session.finish().is_some() {
            break;
        }
        logits = target.feed(&[token], false).unwrap();
    }
    session.tokens().to_vec()
}

#[test]
fn proposals_stop_where_they_do_not_pay() {
    let ms = Duration::from_millis;
    let mut p = Pace::new(SpeculationOptions::default()).unwrap();
    // Two plain steps first: one builds the plan, the other is measured.
    for _ in 0..2 {
        assert_eq!(p.count(1), 0);
        p.record(step(0, 0), ms(10));
    }
    // Nothing is accepted, and a step takes longer.
    let mut tried = 0;
    while p.count(1) > 0 {
        p.record(step(1, 0), ms(15));
        tried += 1;
    }
    assert_eq!(tried, ROUNDS + 1);
    assert!((1..PAUSE).all(|_| p.count(1) == 0));
    assert!(p.count(1) > 0);
    // All are accepted: more are proposed.
    let mut p = Pace::new(SpeculationOptions::default()).unwrap();
    (0..2).for_each(|_| p.record(step(0, 0), ms(10)));
    for _ in 0..40 {
        let n = p.count(1);
        assert!(n > 0);
        p.record(step(n, n), ms(15));
    }
    assert_eq!(p.count(1), 7);
    assert!(p.stats().speed_up.is_some_and(|s| s > 4.0), "{:?}", p.stats());
    assert!(Pace::new(SpeculationOptions { most: 16, always: false }).is_err());
}
