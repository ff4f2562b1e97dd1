"""The icicle of prefixes: widths by tokens, colours by hit rate, the same in a table."""

import re
from datetime import timedelta

from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool, update_pool
from tests.telemetry.stored_decisions import a_router, decided


def test_prefixes_are_drawn_by_their_tokens_and_listed_with_where_they_live(
    visitor, noon, django_assert_max_num_queries
):
    create_pool("chat")
    Replica.objects.create(pool=Pool.objects.get(), name="gpu-1", url="http://10.0.0.1:8000")
    router = a_router()
    for seq, chain in enumerate([(1, 2), (1, 2), (1, 3), (1, 3), (9, 9), (8,)]):
        cached = 950 if chain[-1] == 2 else 50
        decided(
            router, noon - timedelta(seconds=20 - seq), seq, blocks=list(chain), positions=None, cached_tokens=cached
        )

    with django_assert_max_num_queries(16):
        text = visitor.get("/prefixes/").text

    shares = re.findall(r'<li style="--share: ([\d.]+)"><a class="(\w+)"', text)
    assert [(round(float(share), 3), colour) for share, colour in shares] == [
        (0.667, "w5"), (0.5, "w9"), (0.5, "w0")
    ]  # fmt: skip
    assert re.search(r"33(\.3)?\s%\s+of the tokens have a unique prefix", text)
    assert 'href="/replicas/gpu-1/"' in text
    below = re.search(r'href="(\?below=\w+)"', text)[1]
    assert "Only prompts that contain the prefix" in visitor.get(f"/prefixes/{below}").text


def test_an_empty_page_says_why_and_nonsense_narrows_nothing(visitor, noon):
    assert "No placement decisions collected yet" in visitor.get("/prefixes/").text
    assert visitor.get("/prefixes/?below=<script>&pool=nowhere").status_code == 200


def test_what_lies_deep_is_drawn_and_listed_once_it_is_asked_for(visitor, noon):
    create_pool("chat")
    router = a_router()
    chains = [range(1, 6), range(1, 6), (1, 2, 3, 9), (1, 2, 8), (1, 7)]  # the second is in the third, and so on
    for seq, chain in enumerate(chains):
        decided(router, noon - timedelta(seconds=20 - seq), seq, blocks=list(chain), positions=None)

    text = visitor.get("/prefixes/").text
    assert text.count('<tr id="p-') == 2
    assert len(re.findall(r'<li style="--share:', text)) == 4
    assert "Show 2 longer prefixes" in text
    assert visitor.get("/prefixes/?rows=all").text.count('<tr id="p-') == 4


def test_prefixes_have_a_size_in_bytes_once_the_model_of_the_pool_is_known(visitor, noon):
    pool, router = create_pool("chat"), a_router()
    for seq in range(2):
        decided(router, noon - timedelta(seconds=20 - seq), seq, blocks=[1, 2], positions=None, hash_tokens=64)
    assert "MiB" not in visitor.get("/prefixes/").text

    update_pool(pool, kv_cache={"bytes_per_token": 327_680})

    text = visitor.get("/prefixes/").text
    assert "A token takes 320 KiB of KV cache" in text
    assert ">40 MiB<" in text  # 128 tokens
    other = create_pool("other", models=["b"])
    assert "KiB" not in visitor.get("/prefixes/").text, "prefixes of several pools have no common size"
    assert "KiB" in visitor.get("/prefixes/?pool=chat").text
    assert "KiB" not in visitor.get(f"/prefixes/?pool={other.name}").text
