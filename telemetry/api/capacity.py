"""``/capacity``: a pool's KV cache in bytes, savings, capacity sweep, a shared cache, and response caches.

``/response-caches``: what the response caches of a pool or task group answered. ``/scaling``: a pool's saturation,
waiting work and recommended replicas, for autoscalers.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import ByName, SchemaField
from controlplane.api.views import TransactionalView
from controlplane.models import Pool
from telemetry.api.breakdown import BreakdownQuery
from telemetry.lab.costs import Prefill
from telemetry.lab.scaling import Limit
from telemetry.lab.shared_cache import Advice, CacheTier, TierEffect, tier_parameters, tiers_of
from telemetry.lab.sweeps import SweepPoint
from telemetry.services.figures.kv_streams import UNKNOWN
from telemetry.services.figures.semantic_cache import BY_SEVERITY, semantic_cache_of
from telemetry.services.lab.costs import response_cache_figures
from telemetry.services.lab.scaling import scaling_of
from telemetry.services.lab.sizing import sizing_of


class CapacityQuery(BreakdownQuery):
    """Parameters of ``/capacity``. Default ``from``: a day before ``to``."""

    group = None  # type: ignore[assignment]  # DRF's way to leave a field out

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Add latency and bandwidth of each tier."""
        return {
            **super().get_fields(),
            **{
                name: serializers.FloatField(
                    required=False, min_value=low, max_value=high, help_text=f"{label}; default {default:g}"
                )
                for name, (label, default, (low, high)) in tier_parameters().items()
            },
        }

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Add the window."""
        end = attrs.get("to") or timezone.now()
        try:
            return super().validate({"from": end - timedelta(days=1), **attrs, "to": end})
        except OverflowError:
            raise serializers.ValidationError({"to": "expected a later time"}) from None


class GroupSavingsSerializer(serializers.Serializer[Any]):
    """Savings of a task group; "": requests without one."""

    group = serializers.CharField(allow_blank=True)
    requests = serializers.IntegerField()
    prompt_tokens_per_day = serializers.FloatField()
    saved_per_day = SchemaField(Prefill, help_text="delivered from caches")
    missed_per_day = SchemaField(Prefill, help_text="reachable, and computed all the same")
    computed_per_day = SchemaField(Prefill)


class SavingsSerializer(GroupSavingsSerializer):
    """Savings of a pool; ``start`` to ``end`` is the traffic that they rest on."""

    group = None  # type: ignore[assignment]  # as above
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    measured_hours = serializers.FloatField(help_text="of traffic, from which figures a day are extrapolated")
    replica_hours_per_day = serializers.FloatField(help_text="of all replicas")
    traffic_ratio = serializers.FloatField(allow_null=True, help_text="replayed requests / all requests")
    currency = serializers.CharField(allow_null=True, allow_blank=True)
    replica_day_price = serializers.FloatField(allow_null=True)
    groups = GroupSavingsSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class SweepSerializer(serializers.Serializer[Any]):
    """The newest capacity sweep. Without calibration there are no summaries."""

    what_if = serializers.IntegerField()
    state = serializers.CharField()
    is_calibrated = serializers.BooleanField(allow_null=True)
    problems = serializers.ListField(child=serializers.CharField())
    requests = serializers.IntegerField(allow_null=True)
    by_replicas = SchemaField(list[SweepPoint])
    by_cache = SchemaField(list[SweepPoint])
    summaries = serializers.ListField(child=serializers.CharField())


class TierAdviceSerializer(serializers.Serializer[Any]):
    """Advice on one tier; ``effect`` is null where an input is missing, see ``needs``."""

    tier = SchemaField(CacheTier)
    advice = serializers.ChoiceField(choices=[str(advice) for advice in Advice])
    summary = serializers.CharField()
    break_even_tokens = serializers.FloatField(allow_null=True)
    never_wins = serializers.BooleanField()
    effect = SchemaField(TierEffect, allow_null=True)
    money_per_day = serializers.FloatField(allow_null=True)
    cases = SchemaField(list[TierEffect], help_text="sensitivity")
    needs = serializers.ListField(child=serializers.CharField())


class SharedCacheSerializer(serializers.Serializer[Any]):
    """The baseline without a tier, in shares of the prompt tokens, and the advice."""

    delivered_ratio = serializers.FloatField(allow_null=True)
    reachable_ratio = serializers.FloatField(allow_null=True)
    lost_ratio = serializers.FloatField(allow_null=True, help_text="to capacity and fragmentation")
    placement_ratio = serializers.FloatField(allow_null=True, help_text="what a policy can add without a tier")
    requests = serializers.IntegerField(allow_null=True, help_text="whose lost prefixes were measured")
    tiers = TierAdviceSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class CacheEffectSerializer(serializers.Serializer[Any]):
    """What an exact cache with one time to live would have answered in the window; of a sample, extended to all."""

    ttl_s = serializers.IntegerField()
    cacheable_requests = serializers.FloatField()
    hits = serializers.FloatField(help_text="stored earlier, within the time to live")
    followers = serializers.FloatField(help_text="while an identical request was running")
    repeat_ratio = serializers.FloatField(allow_null=True, help_text="(hits + followers) / cacheable requests")
    standard_error = serializers.FloatField(allow_null=True, help_text="of repeat_ratio, from sampling; 0: not sampled")
    prompt_tokens = serializers.FloatField(allow_null=True, help_text="of the repeats")
    uncached_prompt_tokens = serializers.FloatField(
        allow_null=True, help_text="of those, computed without prefix caches"
    )
    generated_tokens = serializers.FloatField(allow_null=True, help_text="of the repeats")
    prefill = SchemaField(Prefill, help_text="of the uncached prompt tokens, in the window")


class CacheEstimateSerializer(serializers.Serializer[Any]):
    """A task group ("": requests of none). With a response cache: no estimate, because hits are not captured."""

    group = serializers.CharField(allow_blank=True)
    requests = serializers.IntegerField()
    has_response_cache = serializers.BooleanField()
    cacheable_requests = serializers.FloatField(allow_null=True)
    effects = CacheEffectSerializer(many=True, help_text="by time to live, at most the length of the traffic")


class ResponseCacheEstimateSerializer(serializers.Serializer[Any]):
    """What exact response caches would have answered in the window, not in a day."""

    start = serializers.DateTimeField(help_text="of the captured traffic")
    end = serializers.DateTimeField()
    sample_ratio = serializers.FloatField(help_text="part of the prompts whose requests have digests")
    traffic_ratio = serializers.FloatField(allow_null=True, help_text="captured requests / all requests")
    currency = serializers.CharField(allow_null=True, allow_blank=True)
    total = CacheEstimateSerializer(help_text="all task groups without a response cache")
    groups = CacheEstimateSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class PrefillRateSerializer(serializers.Serializer[Any]):
    """Tokens that a replica prefills in a second, and where the figure comes from."""

    tokens_per_s = serializers.FloatField(allow_null=True)
    low = serializers.FloatField(allow_null=True, help_text="of the range of hourly fits")
    high = serializers.FloatField(allow_null=True)
    source = serializers.CharField()  # type: ignore[assignment]  # DRF's own attribute


class CapacityResponse(serializers.Serializer[Any]):
    """Null: unknown. ``savings`` is null without replayed requests, ``sweep`` until one was requested."""

    pool = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    kv_bytes_per_token = serializers.IntegerField(allow_null=True)
    kv_notes = serializers.ListField(child=serializers.CharField())
    prefill_rate = PrefillRateSerializer()
    savings = SavingsSerializer(allow_null=True)
    sweep = SweepSerializer(allow_null=True)
    shared_cache = SharedCacheSerializer()
    response_cache = ResponseCacheEstimateSerializer(
        allow_null=True, help_text="null: no captured request was examined"
    )


class CapacityView(TransactionalView):
    """Capacity and cost of a pool."""

    @extend_schema(parameters=[CapacityQuery], responses=CapacityResponse)
    def get(self, request: Request) -> Response:
        """Savings a day in time and money, the newest capacity sweep, and what other caches would bring."""
        query = CapacityQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        params: dict[str, Any] = query.validated_data
        pool, window = params["pool"], params["window"]
        sizing = sizing_of(pool, window, tiers_of(params))
        return Response({"pool": pool.name, "start": window.start, "end": window.end, **sizing.as_json()})


class SemanticRouterSerializer(serializers.Serializer[Any]):
    """The semantic cache at one router, as of the last scrape; null: not reported."""

    router = serializers.CharField()
    state = serializers.ChoiceField(choices=[*BY_SEVERITY, UNKNOWN])
    is_partly = serializers.BooleanField(help_text="other callers or processes of the router are in another state")
    recent_precision = serializers.FloatField(allow_null=True)
    lower_bound = serializers.FloatField(allow_null=True, help_text="of the precision, 95 %")
    window_checks = serializers.FloatField(allow_null=True)
    entries = serializers.FloatField(allow_null=True)
    reason = serializers.CharField(allow_blank=True, help_text="why the state is unknown")


class PrecisionPointSerializer(serializers.Serializer[Any]):
    """The checks of requests with at least this similarity."""

    threshold = serializers.FloatField()
    checks = serializers.IntegerField()
    wrong = serializers.IntegerField()
    precision = serializers.FloatField()
    interval = serializers.ListField(child=serializers.FloatField(), help_text="of the precision, 95 %: low, high")


class SemanticEvidenceSerializer(serializers.Serializer[Any]):
    """The semantic cache of a task group; ``points`` by ascending threshold, of all checks so far."""

    routers = SemanticRouterSerializer(many=True, source="rows")
    points = PrecisionPointSerializer(many=True)


class ResponseCachesResponse(serializers.Serializer[Any]):
    """What exact and semantic caches answered from ``start`` to ``end``; null: unknown."""

    pool = serializers.CharField()
    group = serializers.CharField(allow_null=True, allow_blank=True, help_text="null: all")
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    hits = serializers.IntegerField(allow_null=True, help_text="requests answered without a replica")
    misses = serializers.IntegerField(allow_null=True, help_text="cacheable requests that a replica answered")
    bypassed = serializers.IntegerField(allow_null=True, help_text="requests of the same groups that are not cacheable")
    hit_ratio = serializers.FloatField(allow_null=True, help_text="hits / (hits + misses)")
    prompt_tokens = serializers.IntegerField(allow_null=True, help_text="of the hits")
    generated_tokens = serializers.IntegerField(allow_null=True, help_text="of the hits")
    prefill = SchemaField(Prefill, help_text="of those prompt tokens: at most this was saved in the window")
    currency = serializers.CharField(allow_null=True, allow_blank=True)
    notes = serializers.ListField(child=serializers.CharField())
    semantic = SemanticEvidenceSerializer(allow_null=True, help_text="null: no group was named, or it has none")


class ResponseCachesView(TransactionalView):
    """What the response caches of a pool, or of one of its task groups, answered."""

    @extend_schema(parameters=[BreakdownQuery], responses=ResponseCachesResponse)
    def get(self, request: Request) -> Response:
        """Requests, tokens, prefill time and money that no replica had to spend, and evidence of a semantic cache."""
        query = BreakdownQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        params: dict[str, Any] = query.validated_data
        pool, window, name = params["pool"], params["window"], params.get("group")
        figures = response_cache_figures([pool], window, group=name)
        group = None if name is None else pool.groups.filter(name=name).first()
        body = {
            **{field.name: getattr(figures, field.name) for field in fields(figures)},
            "hit_ratio": figures.hit_ratio,
            "pool": pool.name,
            "group": name,
            "start": window.start,
            "end": window.end,
            "semantic": semantic_cache_of(group, pool.name),
        }
        return Response(ResponseCachesResponse(body).data)


class ScalingQuery(serializers.Serializer[Any]):
    """Parameters of ``/scaling``."""

    pool = ByName(queryset=Pool.objects.all())


class ScalingResponse(serializers.Serializer[Any]):
    """Null: unknown. ``reason`` explains the recommendation, or why there is none."""

    pool = serializers.CharField()
    replicas = serializers.IntegerField(help_text="active ones that were scraped lately")
    saturation_ratio = serializers.FloatField(allow_null=True, help_text="0 to 1: the higher of the next two")
    prefill_ratio = serializers.FloatField(allow_null=True, help_text="offered work / prefill rate, of all routers")
    kv_usage_ratio = serializers.FloatField(allow_null=True, help_text="mean over the replicas")
    waiting_work_s = serializers.FloatField(allow_null=True, help_text="time that the waiting tokens need")
    peak_saturation_ratio = serializers.FloatField(
        allow_null=True, help_text="in the busiest minute of the last hour; above 1: more than the replicas can prefill"
    )
    recommended_replicas = serializers.IntegerField(allow_null=True)
    limited_by = serializers.CharField(
        allow_null=True, help_text=f"what decides the recommendation: {', '.join(Limit)}"
    )
    reason = serializers.CharField(allow_blank=True)


class ScalingView(TransactionalView):
    """Scaling signals of a pool."""

    @extend_schema(parameters=[ScalingQuery], responses=ScalingResponse)
    def get(self, request: Request) -> Response:
        """Saturation, waiting work and recommended replicas of a pool, as of the newest scrapes."""
        query = ScalingQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        return Response(scaling_of([query.validated_data["pool"]], timezone.now())[0].as_json())
