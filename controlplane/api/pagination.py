"""How lists are cut into pages."""

from rest_framework.pagination import CursorPagination, LimitOffsetPagination


class Pages(LimitOffsetPagination):
    """``?limit=&offset=`` for sets that people keep: at most 1000 rows an answer."""

    default_limit = 100
    max_limit = 1000


class EventPages(CursorPagination):
    """``?cursor=`` for sets that only grow: newest first, and steady while new rows come in."""

    page_size = 100
    page_size_query_param = "limit"
    max_page_size = 1000
    ordering = ("-at", "-id")
