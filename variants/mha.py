"""Plain multi-head attention: changes nothing. Vaswani et al., 2017, https://arxiv.org/abs/1706.03762"""

import jaxattn as ja


class mha(ja.HeadTransform):
    """Plain multi-head attention; with `kv_heads` in the spec, GQA or MQA.

    heads[h] = softmax(scale * Q[h] K[h]^T) V[h]

    Example:
        >>> mha(), mha().changes
        (mha(), False)

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.2.
    """
