"""Networks that others wrote, by name, small and with random weights.

Each entry of `ZOO` builds a network, its inputs, and `output`, which says what in the network's output is
judged: None for the output itself, a key, an index, or a function that picks a tensor. Dense outputs are
judged at a few positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from varprop.gaussian import Activation, move

from .operators import declare_torchvision

EXAMPLES, CLASSES = 2, 10


@dataclass(frozen=True)
class Built:
    """A network with everything that a call needs."""

    net: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    batched: bool = True
    """False if the inputs are one example, such as a graph."""


@dataclass(frozen=True)
class Entry:
    package: str
    build: Callable[[], Built]

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


ZOO: dict[str, Entry] = {}


def add(package: str, **builders: Callable[[], Built]) -> None:
    for name, build in builders.items():
        title = name if package == "torch" else f"{package} {name}"
        ZOO[title] = Entry(package, build)


def package(name: str) -> Any:
    """A package, imported when a network of it is built."""
    declare_torchvision()  # others import it
    return import_module(name)


# -------------------- inputs and outputs


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(EXAMPLES, channels, size, size)


def tokens(length: int = 8, vocabulary: int = 64) -> Tensor:
    return torch.randint(3, vocabulary, (EXAMPLES, length))


def classifier(net: nn.Module, size: int = 32, output: Any = None) -> Built:
    return Built(net, (images(size),), output=output)


def few_pixels(f: Activation) -> Activation:
    """Sixteen positions of a map."""
    return move(lambda t: t[..., :: t.shape[-2] // 4, :: t.shape[-1] // 4], f)


def few_voxels(f: Activation) -> Activation:
    return move(lambda t: t[..., 4::8, 4::8, 4::8], f)


def last_position(f: Activation) -> Activation:
    """A few features of the last position of a sequence."""
    return move(lambda t: t[:, -1, :CLASSES], f)


def few_of(key: str, pick: Callable[[Activation], Activation]) -> Callable[[Any], Activation]:
    """A few entries of one tensor in a structure."""
    return lambda output: pick(output[key])


# -------------------- torchvision


def _vision(name: str = "torchvision.models") -> Any:
    return package(name)


def _vgg() -> nn.Module:
    vgg = _vision("torchvision.models.vgg")
    net = vgg.VGG(vgg.make_layers([16, "M", 32, "M", 64, 64, "M", 64, 64, "M", 64, 64, "M"], batch_norm=True))
    net.classifier = nn.Sequential(
        nn.Linear(64 * 49, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )
    return net


def _alexnet() -> nn.Module:
    net = _vision().AlexNet(CLASSES)
    net.classifier[1], net.classifier[4] = nn.Linear(9216, 64), nn.Linear(64, 64)
    net.classifier[6] = nn.Linear(64, CLASSES)
    return net


def _resnet(block: str, layers: list[int], **options: int) -> nn.Module:
    resnet = _vision("torchvision.models.resnet")
    return resnet.ResNet(getattr(resnet, block), layers, num_classes=CLASSES, **options)


def _densenet() -> nn.Module:
    return _vision().DenseNet(8, (6, 12, 24, 16), 16, num_classes=CLASSES)


def _shufflenet() -> nn.Module:
    return _vision().ShuffleNetV2([4, 8, 4], [24, 24, 48, 96, 128], CLASSES)


def _efficientnet() -> nn.Module:
    efficientnet = _vision("torchvision.models.efficientnet")
    setting, _ = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=1.0)
    return efficientnet.EfficientNet(setting, 0.2, num_classes=CLASSES, last_channel=128)


def _regnet(se_ratio: float | None) -> nn.Module:
    regnet = _vision("torchvision.models.regnet")
    blocks = regnet.BlockParams.from_init_params(8, 16, 16.0, 2.2, 8, se_ratio=se_ratio)
    return regnet.RegNet(blocks, num_classes=CLASSES)


def _convnext() -> nn.Module:
    convnext = _vision("torchvision.models.convnext")
    blocks = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, 64, 2)]
    blocks += [convnext.CNBlockConfig(64, None, 2)]
    return convnext.ConvNeXt(blocks, layer_scale=0.5, num_classes=CLASSES)


def _swin(version: str) -> nn.Module:
    swin = _vision("torchvision.models.swin_transformer")
    blocks = {
        "": {},
        "V2": {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2},
    }[version]
    return swin.SwinTransformer([4, 4], 24, [2, 2], [3, 6], [4, 4], num_classes=CLASSES, **blocks)


def _vision_transformer() -> nn.Module:
    return _vision().VisionTransformer(32, 8, 3, 4, 48, 96, num_classes=CLASSES)


def _maxvit() -> nn.Module:
    return _vision().MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 8, 0.2, num_classes=CLASSES)


def _fcn() -> nn.Module:
    segmentation = _vision("torchvision.models.segmentation.fcn")
    backbone = _vision("torchvision.models._utils").IntermediateLayerGetter(
        _resnet("BasicBlock", [1, 1, 1, 1]), {"layer3": "out"}
    )
    return segmentation.FCN(backbone, segmentation.FCNHead(256, 3))


def _segmenter(name: str) -> Built:
    models = _vision("torchvision.models.segmentation")
    net = getattr(models, name)(weights=None, weights_backbone=None, num_classes=3)
    return Built(net, (images(64),), output=few_of("out", few_pixels))


add(
    "torchvision",
    alexnet=lambda: classifier(_alexnet(), 64),
    vgg11_bn=lambda: classifier(_vgg()),
    resnet18=lambda: classifier(_resnet("BasicBlock", [2, 2, 2, 2])),
    resnet50=lambda: classifier(_resnet("Bottleneck", [3, 4, 6, 3])),
    resnext50=lambda: classifier(_resnet("Bottleneck", [3, 4, 6, 3], groups=16, width_per_group=4)),
    wide_resnet=lambda: classifier(_resnet("Bottleneck", [1, 1, 1, 1], width_per_group=128)),
    densenet121=lambda: classifier(_densenet(), 64),
    mobilenet_v2=lambda: classifier(_vision().mobilenet_v2(num_classes=CLASSES, width_mult=0.35), 64),
    mobilenet_v3_small=lambda: classifier(
        _vision().mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5), 64
    ),
    mobilenet_v3_large=lambda: classifier(
        _vision().mobilenet_v3_large(num_classes=CLASSES, width_mult=0.25), 64
    ),
    shufflenet_v2=lambda: classifier(_shufflenet(), 64),
    efficientnet_b0=lambda: classifier(_efficientnet(), 64),
    regnet_x=lambda: classifier(_regnet(None)),
    regnet_y=lambda: classifier(_regnet(0.25)),
    convnext=lambda: classifier(_convnext()),
    swin=lambda: classifier(_swin("")),
    swin_v2=lambda: classifier(_swin("V2")),
    vit=lambda: classifier(_vision_transformer()),
    maxvit=lambda: classifier(_maxvit(), 64),
    googlenet=lambda: classifier(
        _vision().googlenet(num_classes=CLASSES, aux_logits=False, init_weights=True), 64
    ),
    inception_v3=lambda: classifier(
        _vision().inception_v3(num_classes=CLASSES, aux_logits=False, init_weights=False), 75
    ),
    squeezenet1_1=lambda: classifier(_vision().squeezenet1_1(num_classes=CLASSES), 64),
    mnasnet=lambda: classifier(_vision().MNASNet(0.35, CLASSES), 64),
    fcn=lambda: Built(_fcn(), (images(32),), output=few_of("out", few_pixels)),
    deeplabv3_mobilenet=lambda: _segmenter("deeplabv3_mobilenet_v3_large"),
    lraspp_mobilenet=lambda: _segmenter("lraspp_mobilenet_v3_large"),
)


# -------------------- timm


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Built]:
    return lambda: classifier(package("timm").create_model(name, num_classes=CLASSES, **options), size)


def _repvgg() -> Built:
    blocks = package("timm.models.byobnet")._rep_vgg_bcfg(d=(2, 4, 14, 1), wf=(0.25, 0.25, 0.25, 0.25))
    return _timm("repvgg_a0", blocks=blocks, stem_chs=16)()


def _mobileone() -> Built:
    blocks = package("timm.models.byobnet")._mobileone_bcfg(
        wf=(0.25, 0.25, 0.25, 0.25), num_conv_branches=2, d=(2, 4, 4, 1)
    )
    return _timm("mobileone_s0", blocks=blocks, stem_chs=16)()


def _mixer(ratio: Any = (0.5, 4.0), **layers: str) -> Built:
    mixers = package("timm.models.mlp_mixer")
    parts = {key: getattr(mixers, name) for key, name in layers.items()}
    return classifier(mixers.MlpMixer(CLASSES, **SMALL, num_blocks=3, mlp_ratio=ratio, **parts))


def _poolformer() -> Built:
    metaformer = package("timm.models.metaformer")
    net = metaformer.MetaFormer(
        num_classes=CLASSES,
        depths=(1, 1, 2, 1),
        dims=(16, 32, 48, 64),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=metaformer.GroupNorm1,
        layer_scale_init_values=0.5,
        res_scale_init_values=None,
        use_mlp_head=False,
    )
    return classifier(net, 64)


def _sequencer() -> Built:
    net = package("timm.models.sequencer").Sequencer2d(
        CLASSES,
        32,
        layers=(1, 1),
        patch_sizes=(4, 2),
        embed_dims=(24, 32),
        hidden_sizes=(8, 12),
        mlp_ratios=(2, 2),
    )
    return classifier(net)


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48}

add(
    "timm",
    convmixer=lambda: classifier(
        package("timm.models.convmixer").ConvMixer(48, 6, 5, 4, num_classes=CLASSES)
    ),
    mixer=lambda: _mixer(),
    resmlp=lambda: _mixer(4, block_layer="ResBlock", norm_layer="Affine"),
    gmlp=lambda: _mixer(4, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
    vit=_timm("vit_tiny_patch16_224", 32, **SMALL, depth=3),
    deit_distilled=_timm("deit_tiny_distilled_patch16_224", 32, **SMALL, depth=3),
    eva02=_timm("eva02_tiny_patch14_224", 32, **SMALL, depth=3),
    beit=_timm("beit_base_patch16_224", 32, **SMALL, depth=3, num_heads=3, init_values=0.5),
    cait=_timm("cait_xxs24_224", 32, **SMALL, depth=2, init_values=0.5),
    xcit=_timm("xcit_nano_12_p16_224", 32, img_size=32, patch_size=8, embed_dim=48, depth=3, eta=0.5),
    nf_resnet26=_timm("nf_resnet26", channels=(32, 64, 128, 256), stem_chs=16),
    repvgg_a0=_repvgg,
    poolformer=_poolformer,
    edgenext=_timm("edgenext_xx_small", ls_init_value=0.5),
    levit=_timm("levit_128s", 64, img_size=64),
    coat_lite=_timm("coat_lite_tiny", 64, img_size=64, embed_dims=(16, 32, 48, 64)),
    visformer=_timm("visformer_tiny", 64, img_size=64, embed_dim=96),
    mobileone=_mobileone,
    ghostnet=_timm("ghostnet_050"),
    hrnet=_timm("hrnet_w18_small"),
    resnest=_timm("resnest14d"),
    seresnet18=_timm("seresnet18", channels=(16, 32, 64, 128), zero_init_last=False),
    res2net=_timm("res2net50_26w_4s", channels=(16, 32, 64, 128), zero_init_last=False),
    efficientvit=_timm("efficientvit_b0"),
    fastvit=_timm("fastvit_t8"),
    mobilevit=_timm("mobilevit_xxs"),
    convnextv2=_timm("convnextv2_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    pvt_v2=_timm("pvt_v2_b0"),
    sequencer2d=_sequencer,
    tinynet=_timm("tinynet_e"),
)


# -------------------- transformers


SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_labels": CLASSES,
    "initializer_range": 0.1,
}


def _transformer(
    kind: str, config: str, inputs: Callable[[], dict[str, Tensor]], output: Any, **sizes: Any
) -> Callable[[], Built]:
    def build() -> Built:
        hub = package("transformers")
        net = getattr(hub, kind)(getattr(hub, config)(**sizes))
        return Built(net, kwargs=inputs(), output=output)

    return build


def _words() -> dict[str, Tensor]:
    mask = torch.ones(EXAMPLES, 8, dtype=torch.long)
    return {"input_ids": tokens(), "attention_mask": mask}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": images(32)}


def _text(kind: str, **sizes: Any) -> Callable[[], Built]:
    """A classifier of texts."""
    return _transformer(
        f"{kind}ForSequenceClassification", f"{kind}Config", _words, "logits", **{**SIZES, **sizes}
    )


def _language(kind: str, config: str, **sizes: Any) -> Callable[[], Built]:
    """A language model, judged by the logits of the next word."""
    return _transformer(kind, config, _words, few_of("logits", last_position), **{**SIZES, **sizes})


PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}
GPT2 = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 64,
    "initializer_range": 0.1,
}
T5 = {"vocab_size": 64, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}

add(
    "transformers",
    bert=_text("Bert", max_position_embeddings=32),
    distilbert=_text("DistilBert", dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=32),
    roberta=_text("Roberta", max_position_embeddings=32),
    electra=_text("Electra", embedding_size=48, max_position_embeddings=32),
    albert=_text("Albert", embedding_size=24, max_position_embeddings=32),
    deberta=_text(
        "DebertaV2",
        max_position_embeddings=32,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        pooler_hidden_size=48,
    ),
    mpnet=_text("MPNet", max_position_embeddings=32),
    gpt2=_language("GPT2LMHeadModel", "GPT2Config", **GPT2),
    llama=_language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, max_position_embeddings=32),
    mistral=_language(
        "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, max_position_embeddings=32
    ),
    qwen2=_language("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, max_position_embeddings=32),
    opt=_language(
        "OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=48, max_position_embeddings=32
    ),
    t5_encoder=_transformer(
        "T5EncoderModel", "T5Config", _words, few_of("last_hidden_state", last_position), **T5
    ),
    vit=_transformer("ViTForImageClassification", "ViTConfig", _pixels, "logits", **PATCHES),
    clip_vision=_transformer(
        "CLIPVisionModel", "CLIPVisionConfig", _pixels, few_of("last_hidden_state", last_position), **PATCHES
    ),
    dinov2=_transformer(
        "Dinov2ForImageClassification", "Dinov2Config", _pixels, "logits", **PATCHES, layerscale_value=0.5
    ),
    segformer=_transformer(
        "SegformerForImageClassification",
        "SegformerConfig",
        _pixels,
        "logits",
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 16, 32, 32],
        decoder_hidden_size=32,
        num_labels=CLASSES,
    ),
    whisper_encoder=lambda: _whisper(),
    wav2vec2=_transformer(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        lambda: {"input_values": torch.randn(EXAMPLES, 800)},
        "logits",
        **SIZES,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=32,
    ),
)


def _whisper() -> Built:
    hub = package("transformers.models.whisper.modeling_whisper")
    config = package("transformers").WhisperConfig(
        d_model=48,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        num_mel_bins=16,
        max_source_positions=16,
        vocab_size=64,
        init_std=0.1,
    )
    spectrum = torch.randn(EXAMPLES, 16, 32)
    return Built(hub.WhisperEncoder(config), (spectrum,), output=few_of("last_hidden_state", last_position))


# -------------------- segmentation


def _smp(kind: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        smp = package("segmentation_models_pytorch")
        net = getattr(smp, kind)("timm-mobilenetv3_small_075", encoder_weights=None, classes=2, **options)
        return Built(net, (images(64),), output=few_pixels)

    return build


add(
    "segmentation_models_pytorch",
    unet=_smp("Unet", decoder_channels=(64, 32, 16, 16, 8)),
    unet_plus_plus=_smp("UnetPlusPlus", decoder_channels=(64, 32, 16, 16, 8)),
    linknet=_smp("Linknet"),
    fpn=_smp("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
    pspnet=_smp("PSPNet", psp_out_channels=32),
    deeplab_v3_plus=_smp("DeepLabV3Plus", decoder_channels=32),
    manet=_smp("MAnet", decoder_channels=(64, 32, 16, 16, 8), decoder_pab_channels=16),
)


# -------------------- monai


def _monai(kind: str, size: int = 32, output: Any = few_pixels, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        net = getattr(package("monai.networks.nets"), kind)(**options)
        return Built(net, (images(size, 1),), output=output)

    return build


PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

add(
    "monai",
    basic_unet=_monai("BasicUNet", **PLANE, features=(8, 8, 16, 32, 64, 8)),
    unet=_monai("UNet", **PLANE, channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
    seg_resnet=_monai("SegResNet", **PLANE, init_filters=8),
    attention_unet=_monai("AttentionUnet", **PLANE, channels=(8, 16, 32), strides=(2, 2)),
    dyn_unet=_monai(
        "DynUNet",
        **PLANE,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
    ),
    densenet=_monai(
        "DenseNet", output=None, **PLANE, init_features=16, growth_rate=8, block_config=(3, 3, 3)
    ),
    unetr=_monai(
        "UNETR", **PLANE, img_size=(32, 32), feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4
    ),
)


# -------------------- torch_geometric


def _graph_network(kind: str, **options: Any) -> Callable[[], Built]:
    """Nodes of one graph: a ring with a few chords."""

    def build() -> Built:
        net = getattr(package("torch_geometric.nn"), kind)(8, 16, 2, 4, **options)
        nodes = torch.arange(12)
        edges = torch.stack((nodes.repeat(2), torch.cat(((nodes + 1) % 12, (nodes + 5) % 12))))
        return Built(net, (torch.randn(12, 8), torch.cat((edges, edges.flip(0)), 1)), batched=False)

    return build


add(
    "torch_geometric",
    gcn=_graph_network("GCN"),
    gat=_graph_network("GAT", heads=2),
    graph_sage=_graph_network("GraphSAGE"),
    gin=_graph_network("GIN"),
)


# -------------------- torch alone


class Recurrent(nn.Module):
    """The last state of a recurrent layer through a linear one."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 24, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x)
        return self.head(states[:, -1])


class Packed(nn.Module):
    """A recurrent layer on sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 24, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(states.sum(1) / lengths.unsqueeze(-1))


class Encoder(nn.Module):
    """A transformer encoder of words and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(64, 32), nn.Parameter(torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(words) + self.positions).mean(1))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    pairs = [(inputs, outputs), (outputs, outputs)]
    return nn.Sequential(
        *(part for a, b in pairs for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()))
    )


class UNet(nn.Module):
    """A U-Net of three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 8), _block(8, 16), _block(16, 32)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([_block(32, 16), _block(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for block in self.down:
            x = block(x)
            levels.append(x)
            x = F.max_pool2d(x, 2)
        x = levels.pop()
        for up, block in zip(self.ups, self.up, strict=True):
            x = block(torch.cat((levels.pop(), up(x)), 1))
        return self.head(x)


class Graph(nn.Module):
    """Two graph convolutions with a dense adjacency matrix; the graph is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        links = torch.eye(12) + torch.rand(12, 12).gt(0.7)
        self.register_buffer("adjacency", links / links.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.adjacency @ self.second(F.relu(self.adjacency @ self.first(x)))


def _sequences() -> Tensor:
    return torch.randn(EXAMPLES, 7, 6)


def _perceptron() -> Built:
    parts = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.ReLU())]
    return Built(nn.Sequential(*parts, nn.Linear(16, CLASSES)), (torch.randn(EXAMPLES, 16),))


add(
    "torch",
    perceptron=_perceptron,
    lstm=lambda: Built(Recurrent(nn.LSTM), (_sequences(),)),
    gru=lambda: Built(Recurrent(nn.GRU), (_sequences(),)),
    packed_lstm=lambda: Built(Packed(), (_sequences(), torch.tensor([7, 4]))),
    transformer_encoder=lambda: Built(Encoder(), (tokens(),)),
    unet=lambda: Built(UNet(), (images(32),), output=few_pixels),
    dense_gcn=lambda: Built(Graph(), (torch.randn(EXAMPLES, 12, 8),)),
)
