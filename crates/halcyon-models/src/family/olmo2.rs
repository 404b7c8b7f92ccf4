//! OLMo 2: norms after the parts of a layer, and norms over all queries and all keys.

use super::{Base, Family};
use crate::rope::Layout;
use crate::spec::{Order, QkNorm, Spec};

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    hf: &["olmo2"],
    from_hf: |c| Ok(own(Base::hf("olmo2", c)?)),
    gguf: &["olmo2"],
    from_gguf: |m| Ok(own(Base::gguf("olmo2", m, Layout::Half)?)),
};

fn own(base: Base) -> Spec {
    let (mut s, norm) = (base.spec(), base.rms());
    s.layers.iter_mut().for_each(|l| l.order = Order::After);
    s.each_attention(|_, a| a.qk_norm = Some(QkNorm { norm, by_head: false, after_rope: false }));
    s
}
