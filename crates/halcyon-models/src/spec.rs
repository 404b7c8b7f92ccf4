//! What a language model computes: sizes, kinds of layers and their options. A family's file
//! (`crate::family`) makes a [`Spec`] from a configuration, and `crate::decoder` computes it.

use crate::rope::Rope;

/// A decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The family's name: `llama`.
    pub family: &'static str,
    pub vocabulary: usize,
    /// Size of the activations.
    pub hidden: usize,
    /// The longest sequence that the model was made for.
    pub context: usize,
    /// The embeddings are multiplied by this.
    pub embedding_scale: Option<f64>,
    /// Whether positions have learned embeddings (`position_embd`).
    pub learned_positions: bool,
    /// Whether embeddings are normalised (`token_embd_norm`).
    pub embedding_norm: Option<Norm>,
    /// Further inputs of the layers.
    pub per_layer: Option<PerLayer>,
    pub layers: Vec<Layer>,
    /// Layers that predict further tokens (MTP). Their numbers follow those of [`Spec::layers`].
    pub ahead: Vec<Layer>,
    pub final_norm: Norm,
    /// The logits are multiplied by this.
    pub logit_scale: Option<f64>,
    /// With `c`, a logit `z` becomes `c tanh(z / c)`.
    pub logit_cap: Option<f64>,
}

impl Spec {
    /// A layer by its number among the decoder's layers and those that predict further tokens.
    pub fn layer(&self, i: usize) -> Option<&Layer> {
        self.layers.iter().chain(&self.ahead).nth(i)
    }

    /// The description in which the layers that predict further tokens are ordinary ones, as files list them.
    pub(crate) fn listed(&self) -> Spec {
        let layers = self.layers.iter().chain(&self.ahead).cloned().collect();
        Spec { layers, ahead: vec![], ..self.clone() }
    }

    /// Makes the last `count` layers those that predict further tokens.
    pub(crate) fn split_ahead(&mut self, count: usize) {
        self.ahead = self.layers.split_off(self.layers.len().saturating_sub(count));
    }
}

/// Inputs that each layer gets beside the activations: an embedding of the token and a product of its usual
/// embedding, which are added (Gemma 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayer {
    /// Size of the input of one layer.
    pub size: usize,
    pub activation: Activation,
    pub norm: Norm,
}

/// A normalisation over the last axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub kind: NormKind,
    pub eps: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square.
    Rms,
    /// Root mean square with the factor `1 + weight`.
    RmsPlusOne,
    /// Mean and variance.
    Layer,
}

/// Where the norms of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Before the mixer and before the feed-forward part.
    Before,
    /// After them, before the addition to the residual.
    After,
    /// Before and after.
    Both,
    /// Mixer and feed-forward part read the same normed input and are added together.
    Parallel,
    /// As `Parallel`, but the two parts have norms of their own.
    ParallelTwo,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    pub order: Order,
    pub norm: Norm,
    pub mixer: Mixer,
    pub ffn: Ffn,
    /// Size between the two products of the feed-forward part, or of each expert if there is nothing else.
    pub inner: usize,
    /// The results of mixer and feed-forward part are multiplied by this.
    pub residual_scale: Option<f64>,
}

/// The part of a layer that reads other positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    Attention(Box<Attention>),
    Recurrent(Recurrent),
}

/// A mixer whose memory of earlier positions has a fixed size: a causal convolution over each channel, and
/// perhaps a scan with a matrix per head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recurrent {
    /// Positions that the convolution sees, the row's own included.
    pub kernel: usize,
    /// `None`: the convolution is between two gates (`shortconv`), and that is all.
    pub scan: Option<Scan>,
}

/// A scan over positions. Each head has a matrix `S` of `[key, value]`, which is multiplied by a factor of at
/// most 1 and gets a new part at each position; a row reads it with its query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scan {
    pub kind: ScanKind,
    /// Heads of queries and keys.
    pub shared: usize,
    /// Heads of values.
    pub heads: usize,
    /// Size of a query or key.
    pub key: usize,
    /// Size of a value.
    pub value: usize,
    /// Whether value head `h` has the key head `h % shared`, else `h / (heads / shared)`.
    pub tiled: bool,
    /// Of the norm of the result.
    pub eps: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScanKind {
    /// Gated DeltaNet: what `S` returns for the key is replaced by the value.
    Delta,
    /// Mamba 2: key and value are added. The size of a step is limited to this range.
    Mamba { limit: (f64, f64) },
}

impl Scan {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.shared * self.key + self.heads * self.value
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub heads: usize,
    /// Heads of keys and values.
    pub shared: usize,
    /// Size of a head of queries and keys.
    pub key: usize,
    /// Size of a head of values.
    pub value: usize,
    pub scale: f64,
    pub rope: Option<Rope>,
    /// Positions that a row sees, its own included. `None`: all.
    pub window: Option<usize>,
    pub softcap: Option<f64>,
    /// Whether each head has a sink (`attn_sinks`).
    pub sinks: bool,
    /// Whether the results are multiplied by the sigmoid of a gate, which the projection of queries has after
    /// the query of each head.
    pub gate: bool,
    pub qk_norm: Option<QkNorm>,
    /// A norm of each head's values, without weights.
    pub value_norm: Option<Norm>,
    /// Whether values are the products that keys are made of: there is no `attn_v`.
    pub values_of_keys: bool,
    /// The layer before this one whose keys and values are read. `None`: the layer has its own.
    pub keys_of: Option<usize>,
    /// Whether keys and values are stored as one vector per position, from which every head's are computed.
    pub latent: Option<Latent>,
}

/// Multi-head latent attention (DeepSeek-V2). A position is stored as a vector of `rank` elements and a
/// rotated part, which all heads share: [`Attention::shared`] is 1, [`Attention::key`] is the size of both
/// parts and [`Attention::value`] is `rank`. The matrices that would expand the vector are applied to queries
/// and results instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Size between the two products that make the queries. `None`: there is one product.
    pub queries: Option<usize>,
    pub rank: usize,
    /// Elements of a head of queries that are not rotated.
    pub plain: usize,
    /// Size of a head of values after the expansion.
    pub value: usize,
    /// The norm of the vector, and of the queries between their products.
    pub norm: Norm,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    pub norm: Norm,
    /// Over each head, else over all heads together.
    pub by_head: bool,
    /// After the rotation of positions, else before it.
    pub after_rope: bool,
}

/// The feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub enum Ffn {
    /// `down(act(gate(x)) * up(x))`.
    Gated(Activation),
    /// `down(act(up(x)))`.
    Plain(Activation),
    Experts(Experts),
    /// A gated part and experts read the same activations. Each has norms of its own before and after, and
    /// the results are added (Gemma 4).
    Beside(Activation, Beside),
}

/// Experts beside a gated part.
#[derive(Clone, Debug, PartialEq)]
pub struct Beside {
    pub experts: Experts,
    /// Size between the products of each expert.
    pub inner: usize,
}

impl Layer {
    /// The experts, and the size between the products of each.
    pub fn experts(&self) -> Option<(&Experts, usize)> {
        match &self.ffn {
            Ffn::Experts(e) => Some((e, self.inner)),
            Ffn::Beside(_, b) => Some((&b.experts, b.inner)),
            Ffn::Gated(_) | Ffn::Plain(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// Exact GELU.
    Gelu,
    Relu,
    /// The square of ReLU.
    ReluSquared,
    /// `(u + 1) * g σ(alpha g)` with the gate `g` clamped to at most `limit`, and the linear part `u` to
    /// `-limit..=limit` (gpt-oss).
    ClampedSwiglu {
        alpha: f64,
        limit: f64,
    },
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// Experts of each row.
    pub used: usize,
    pub activation: Activation,
    pub score: Score,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalise: bool,
    /// The weights are multiplied by this.
    pub scale: Option<f64>,
    /// Groups of experts: how many there are, and of how many the experts are chosen.
    pub groups: Option<(usize, usize)>,
    /// Whether a bias is added to the scores for the choice only (`exp_probs_b`).
    pub choice_bias: bool,
    /// Inner size of the experts that every row uses, which are one feed-forward part (`ffn_*_shexp`).
    pub common: Option<usize>,
    /// Whether the common part has a gate of one output (`ffn_gate_inp_shexp`).
    pub common_gate: bool,
}

/// How the router's outputs become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    Sigmoid,
    /// Softmax over the chosen experts.
    SoftmaxOfChosen,
}
