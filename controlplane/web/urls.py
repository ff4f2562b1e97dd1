"""The control plane's pages."""

from django.urls import path

from controlplane.web.views import fleet, policies, routers, task_groups

app_name = "controlplane"
urlpatterns = [
    path("policies/", policies.policy_list, name="policies"),
    path("policies/<int:policy_id>/", policies.policy_detail, name="policy"),
    path("policies/<int:policy_id>/edit/", policies.policy_edit, name="policy-edit"),
    path("policies/<int:policy_id>/check/", policies.policy_check, name="policy-check"),
    path("policies/<int:policy_id>/rollout/", policies.policy_rollout, name="policy-rollout"),
    path("policies/<int:policy_id>/publish/<int:revision_id>/", policies.policy_publish, name="policy-publish"),
    path("policies/<int:policy_id>/discard/", policies.policy_discard, name="policy-discard"),
    path("policies/<int:policy_id>/restore/<int:number>/", policies.policy_restore, name="policy-restore"),
    path("policies/<int:policy_id>/remove/", policies.policy_remove, name="policy-remove"),
    path("task-groups/<int:group_id>/policy/", policies.policy_create, name="policy-create"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("fleet/pools/new/", fleet.pool_new, name="pool-new"),
    path("fleet/pools/<int:pool_id>/remove/", fleet.pool_remove, name="pool-remove"),
    path("fleet/pools/<int:pool_id>/replicas/new/", fleet.replica_new, name="replica-new"),
    path("fleet/replicas/<int:replica_id>/state/<slug:state>/", fleet.replica_state, name="replica-state"),
    path("fleet/replicas/<int:replica_id>/remove/", fleet.replica_remove, name="replica-remove"),
    path("routers/", routers.router_list, name="routers"),
    path("task-groups/", task_groups.group_list, name="task-groups"),
    path("task-groups/new/<int:pool_id>/", task_groups.group_new, name="task-group-new"),
    path("task-groups/<int:group_id>/", task_groups.group_edit, name="task-group"),
    path("task-groups/<int:group_id>/remove/", task_groups.group_remove, name="task-group-remove"),
]
