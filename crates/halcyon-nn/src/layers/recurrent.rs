use super::linear::linear;
use super::{Dropout, invalid};
use crate::init::Init;
use crate::module::{Module, Visit};
use crate::slot::{Param, in_module};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Tensor};

/// Options of [`Lstm::with`] and [`Gru::with`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentOptions {
    /// The number of stacked layers. Default: 1.
    pub layers: usize,
    /// Whether there are biases. Default: true.
    pub bias: bool,
    /// Whether the batch is the first axis: `[batch, sequence, inputs]`. Default: false.
    pub batch_first: bool,
    /// Probability with which the results of a layer are dropped before the next one, in training.
    pub dropout: f64,
    /// Whether each layer has a second direction, which reads the sequence from its end. The results of the
    /// second direction follow those of the first along the last axis.
    pub bidirectional: bool,
    pub dtype: DType,
}

impl Default for RecurrentOptions {
    fn default() -> RecurrentOptions {
        RecurrentOptions {
            layers: 1,
            bias: true,
            batch_first: false,
            dropout: 0.0,
            bidirectional: false,
            dtype: DType::F32,
        }
    }
}

/// The weights of one layer in one direction.
#[derive(Clone, Debug)]
struct Cell {
    input: Param,
    hidden: Param,
    biases: Option<[Param; 2]>,
}

/// The common part of LSTM and GRU: the cells by layer and direction.
#[derive(Clone, Debug)]
struct Stack {
    /// Layers, each with one or two directions.
    cells: Vec<Vec<Cell>>,
    hidden: usize,
    dropout: Dropout,
    batch_first: bool,
}

impl Stack {
    fn new(
        layer: &str,
        backend: &Backend,
        [inputs, hidden, gates]: [usize; 3],
        o: RecurrentOptions,
    ) -> Result<Stack> {
        if inputs == 0 || hidden == 0 || o.layers == 0 {
            let what =
                format!("{inputs} inputs, {hidden} hidden and {} layers; all must be at least 1", o.layers);
            return Err(invalid(layer, what));
        }
        let bound = 1.0 / (hidden as f64).sqrt();
        let init = Init::Uniform { low: -bound, high: bound };
        let param = |dims: &[usize]| Ok(Param::new(init.tensor(backend, dims, o.dtype)?));
        let directions = 1 + usize::from(o.bidirectional);
        let cell = |k: usize| {
            let below = if k == 0 { inputs } else { hidden * directions };
            let (input, own) = (param(&[gates * hidden, below])?, param(&[gates * hidden, hidden])?);
            let biases = match o.bias {
                true => Some([param(&[gates * hidden])?, param(&[gates * hidden])?]),
                false => None,
            };
            Ok(Cell { input, hidden: own, biases })
        };
        let layer = |k: usize| (0..directions).map(|_| cell(k)).collect::<Result<Vec<_>>>();
        Ok(Stack {
            cells: (0..o.layers).map(layer).collect::<Result<_>>()?,
            hidden,
            dropout: Dropout::new(o.dropout)?,
            batch_first: o.batch_first,
        })
    }

    fn visit(&self, visit: &mut Visit<'_>) {
        for (k, layer) in self.cells.iter().enumerate() {
            for (cell, end) in layer.iter().zip(["", "_reverse"]) {
                visit.child(&format!("weight_ih_l{k}{end}"), &cell.input);
                visit.child(&format!("weight_hh_l{k}{end}"), &cell.hidden);
                if let Some([input, hidden]) = &cell.biases {
                    visit.child(&format!("bias_ih_l{k}{end}"), input);
                    visit.child(&format!("bias_hh_l{k}{end}"), hidden);
                }
            }
        }
    }

    fn count(&self) -> usize {
        self.cells.iter().map(Vec::len).sum()
    }

    /// Like [`Stack::run`], but adds the path of the layer to errors. An error that the input already carries
    /// is left unchanged.
    #[track_caller]
    fn located_run(
        &self,
        x: &Tensor,
        states: &[Tensor],
        step: impl Fn(&Cell, &Tensor, &[Tensor]) -> Vec<Tensor>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        x.check()?;
        let of_layer = |e| in_module(e, &self.cells[0][0].input.module_path());
        let (y, last) = self.run(x, states, step).map_err(of_layer)?;
        y.check().map_err(of_layer)?;
        Ok((y, last))
    }

    /// Runs all cells. `states` are the parts of the state, each `[layers · directions, batch, hidden]`.
    /// `step(cell, gates of the input, state)` returns the state after one time step; the first part of the
    /// state is the result of the time step.
    #[track_caller]
    fn run(
        &self,
        x: &Tensor,
        states: &[Tensor],
        step: impl Fn(&Cell, &Tensor, &[Tensor]) -> Vec<Tensor>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let mut x = if self.batch_first { x.transpose(0, 1) } else { x.clone() };
        let dims = x.dims()?;
        if dims.len() != 3 || dims[0] == 0 {
            let what = format!("the sequence must have three axes, but it is {:?}", dims.as_slice());
            return Err(Error::shape("recurrent layer", what));
        }
        let (steps, batch) = (dims[0], dims[1]);
        for s in states {
            let want = [self.count(), batch, self.hidden];
            if s.dims()?.as_slice() != want {
                let what = format!("the state must be {want:?}, but it is {:?}", s.dims()?.as_slice());
                return Err(Error::shape("recurrent layer", what));
            }
        }
        let mut last: Vec<Vec<Tensor>> = vec![vec![]; states.len()];
        let mut index = 0;
        for (k, layer) in self.cells.iter().enumerate() {
            if k > 0 {
                x = self.dropout.forward(&x);
            }
            let mut results = vec![];
            for (d, cell) in layer.iter().enumerate() {
                let bias = cell.biases.as_ref().map(|[b, _]| b.value());
                // One product computes the gates of the input for all time steps.
                let gates = linear(&x, &cell.input.value(), bias.as_ref());
                let at = |s: &Tensor| s.narrow(0, index, 1usize).squeeze(0);
                let mut state: Vec<Tensor> = states.iter().map(at).collect();
                let mut outputs = vec![];
                for t in 0..steps {
                    let t = if d == 0 { t } else { steps - 1 - t };
                    state = step(cell, &gates.narrow(0, t, 1usize).squeeze(0), &state);
                    outputs.push(state[0].clone());
                }
                if d == 1 {
                    outputs.reverse();
                }
                results.push(Tensor::stack(&outputs, 0));
                last.iter_mut().zip(state).for_each(|(l, s)| l.push(s));
                index += 1;
            }
            x = if results.len() == 1 { results.remove(0) } else { Tensor::cat(&results, -1) };
        }
        let y = if self.batch_first { x.transpose(0, 1) } else { x };
        Ok((y, last.iter().map(|l| Tensor::stack(l, 0)).collect()))
    }

    /// Zeros for a state.
    fn zeros(&self, x: &Tensor) -> Result<Tensor> {
        let dims = x.dims()?;
        let batch = dims.get(usize::from(!self.batch_first)).copied().unwrap_or(0);
        Ok(Tensor::zeros(x.backend(), [self.count(), batch, self.hidden], x.dtype()?))
    }
}

impl Cell {
    /// The part of the gates that the hidden state contributes.
    fn own(&self, h: &Tensor) -> Tensor {
        linear(h, &self.hidden.value(), self.biases.as_ref().map(|[_, b]| b.value()).as_ref())
    }
}

/// Gate number `i`. The gates lie next to each other in the last axis.
fn gate(g: &Tensor, i: usize, hidden: usize) -> Tensor {
    g.narrow(-1, i * hidden, hidden)
}

/// Hidden and cell state of an LSTM, each `[layers · directions, batch, hidden]`.
#[derive(Clone, Debug)]
pub struct LstmState {
    pub hidden: Tensor,
    pub cell: Tensor,
}

/// Long short-term memory (Hochreiter and Schmidhuber 1997). The order of the gates is input, forget, cell,
/// output.
#[derive(Clone, Debug)]
pub struct Lstm(Stack);

impl Module for Lstm {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.0.visit(visit);
    }
    fn kind(&self) -> &'static str {
        "LSTM"
    }
}

impl Lstm {
    /// One layer in one direction.
    ///
    /// # Errors
    /// Those of [`Lstm::with`].
    pub fn new(backend: &Backend, inputs: usize, hidden: usize) -> Result<Lstm> {
        Lstm::with(backend, inputs, hidden, RecurrentOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// `Error::Argument` if a size is 0 or the dropout is not in `0..=1`; errors of the device.
    pub fn with(backend: &Backend, inputs: usize, hidden: usize, o: RecurrentOptions) -> Result<Lstm> {
        Ok(Lstm(Stack::new("Lstm", backend, [inputs, hidden, 4], o)?))
    }

    /// Returns the hidden states of the last layer at every time step, `[sequence, batch, directions ·
    /// hidden]` (with `batch_first` `[batch, sequence, …]`), and the state after the last time step. If no
    /// state is given, the first state is zeros.
    ///
    /// # Errors
    /// `Error::Shape` for an input or state of another shape, with the layer's path; errors that they carry.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, state: Option<&LstmState>) -> Result<(Tensor, LstmState)> {
        let n = self.0.hidden;
        let states = match state {
            Some(s) => vec![s.hidden.clone(), s.cell.clone()],
            None => vec![self.0.zeros(x)?, self.0.zeros(x)?],
        };
        let (y, mut last) = self.0.located_run(x, &states, |cell, gates, s| {
            let g = gates + cell.own(&s[0]);
            let (i, f, o) = (gate(&g, 0, n).sigmoid(), gate(&g, 1, n).sigmoid(), gate(&g, 3, n).sigmoid());
            let c = f * &s[1] + i * gate(&g, 2, n).tanh();
            vec![o * c.tanh(), c]
        })?;
        let cell = last.pop().ok_or_else(|| Error::internal("an LSTM without a cell state"))?;
        let hidden = last.pop().ok_or_else(|| Error::internal("an LSTM without a hidden state"))?;
        Ok((y, LstmState { hidden, cell }))
    }
}

/// Gated recurrent unit (Cho et al. 2014). The order of the gates is reset, update, new. The reset gate is
/// applied after the product with the hidden state, as in PyTorch and cuDNN.
#[derive(Clone, Debug)]
pub struct Gru(Stack);

impl Module for Gru {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.0.visit(visit);
    }
    fn kind(&self) -> &'static str {
        "GRU"
    }
}

impl Gru {
    /// One layer in one direction.
    ///
    /// # Errors
    /// Those of [`Gru::with`].
    pub fn new(backend: &Backend, inputs: usize, hidden: usize) -> Result<Gru> {
        Gru::with(backend, inputs, hidden, RecurrentOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// `Error::Argument` if a size is 0 or the dropout is not in `0..=1`; errors of the device.
    pub fn with(backend: &Backend, inputs: usize, hidden: usize, o: RecurrentOptions) -> Result<Gru> {
        Ok(Gru(Stack::new("Gru", backend, [inputs, hidden, 3], o)?))
    }

    /// Returns the hidden states of the last layer at every time step, `[sequence, batch, directions ·
    /// hidden]` (with `batch_first` `[batch, sequence, …]`), and the state after the last time step, `[layers
    /// · directions, batch, hidden]`. If no state is given, the first state is zeros.
    ///
    /// # Errors
    /// `Error::Shape` for an input or state of another shape, with the layer's path; errors that they carry.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, state: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let n = self.0.hidden;
        let states = [state.map_or_else(|| self.0.zeros(x), |s| Ok(s.clone()))?];
        let (y, mut last) = self.0.located_run(x, &states, |cell, gates, s| {
            let own = cell.own(&s[0]);
            let sum = |i: usize| (gate(gates, i, n) + gate(&own, i, n)).sigmoid();
            let (reset, update) = (sum(0), sum(1));
            let new = (gate(gates, 2, n) + reset * gate(&own, 2, n)).tanh();
            vec![&new + update * (&s[0] - &new)]
        })?;
        Ok((y, last.pop().ok_or_else(|| Error::internal("a GRU without a state"))?))
    }
}
