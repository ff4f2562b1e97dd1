"""URLs of the control plane's pages, and of signing in (``account_urlpatterns``).

There is no sign-up and no password reset by mail: admins add users.
"""

from allauth.account import views as account
from allauth.mfa.base import views as second_factor
from allauth.mfa.recovery_codes import views as recovery_codes
from allauth.mfa.totp import views as totp
from django.urls import path

from controlplane.web.views import (
    audit,
    client_keys,
    fleet,
    policies,
    revisions,
    rollouts,
    routers,
    single_sign_on,
    sources,
    users,
)

app_name = "controlplane"
urlpatterns = [
    path("policies/", policies.policy_list, name="policies"),
    path("policies/<int:policy_id>/", policies.policy_detail, name="policy"),
    path("policies/<int:policy_id>/edit/", policies.policy_edit, name="policy-edit"),
    path("policies/<int:policy_id>/check/", policies.policy_check, name="policy-check"),
    path("policies/<int:policy_id>/rollout/", policies.policy_rollout, name="policy-rollout"),
    path("policies/<int:policy_id>/publish/<int:revision_id>/", policies.policy_publish, name="policy-publish"),
    path("policies/<int:policy_id>/discard/", policies.policy_discard, name="policy-discard"),
    path("policies/<int:policy_id>/revisions/", revisions.revision_list, name="policy-revisions"),
    path("policies/<int:policy_id>/compare/", revisions.revision_compare, name="policy-compare"),
    path("policies/<int:policy_id>/revert/<int:number>/", revisions.policy_revert, name="policy-revert"),
    path("policies/<int:policy_id>/remove/", policies.policy_remove, name="policy-remove"),
    path("rollouts/", rollouts.rollout_list, name="rollouts"),
    path("rollouts/<int:rollout_id>/", rollouts.rollout_detail, name="rollout"),
    *(
        path(
            f"rollouts/<int:rollout_id>/{name}/",
            rollouts.rollout_transition,
            {"transition": name},
            name=f"rollout-{name}",
        )
        for name in rollouts.ACTIONS
    ),
    path("task-groups/<int:group_id>/policy/", policies.policy_create, name="policy-create"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("fleet/warming/", fleet.warming, name="warming"),
    path("fleet/pools/new/", fleet.pool_new, name="pool-new"),
    path("fleet/pools/<int:pool_id>/", fleet.pool_edit, name="pool"),
    path("fleet/pools/<int:pool_id>/remove/", fleet.pool_remove, name="pool-remove"),
    path("fleet/pools/<int:pool_id>/replicas/new/", fleet.replica_new, name="replica-new"),
    path("fleet/replicas/<int:replica_id>/", fleet.replica_edit, name="replica"),
    path("fleet/replicas/<int:replica_id>/state/<slug:state>/", fleet.replica_state, name="replica-state"),
    path("fleet/replicas/<int:replica_id>/remove/", fleet.replica_remove, name="replica-remove"),
    path("fleet/pools/<int:pool_id>/sources/", sources.pool_sources, name="pool-sources"),
    path("fleet/pools/<int:pool_id>/sources/new/", sources.source_new, name="source-new"),
    path("fleet/sources/<int:source_id>/", sources.source_edit, name="source"),
    path("fleet/sources/<int:source_id>/remove/", sources.source_remove, name="source-remove"),
    path("fleet/sources/<int:source_id>/poll/", sources.source_poll, name="source-poll"),
    path("fleet/discovered/<int:discovered_id>/adopt/", sources.discovered_adopt, name="discovered-adopt"),
    path("users/", users.user_list, name="users"),
    path("users/new/", users.user_new, name="user-new"),
    path("users/<int:user_id>/", users.user_detail, name="user"),
    path("users/<int:user_id>/role/", users.user_role, name="user-role"),
    path("users/<int:user_id>/active/", users.user_active, name="user-active"),
    path("users/<int:user_id>/password/", users.user_password, name="user-password"),
    path("users/<int:user_id>/unlock/", users.user_unlock, name="user-unlock"),
    path("users/<int:user_id>/second-factor/", users.user_second_factor, name="user-second-factor"),
    path("projects/new/", users.project_new, name="project-new"),
    path("projects/<int:project_id>/approval/", users.project_approval, name="project-approval"),
    path("projects/<int:project_id>/remove/", users.project_remove, name="project-remove"),
    path("users/<int:user_id>/sessions/end/", users.user_sessions_end, name="user-sessions-end"),
    path("sessions/", users.session_list, name="sessions"),
    path("sessions/<int:session_id>/end/", users.session_end, name="session-end"),
    path("sessions/end-others/", users.sessions_end_others, name="sessions-end-others"),
    path("tokens/", users.tokens, name="tokens"),
    path("tokens/<int:token_id>/revoke/", users.token_revoke, name="token-revoke"),
    path("client-keys/", client_keys.key_list, name="client-keys"),
    path("client-keys/admission/", client_keys.admission, name="admission"),
    path("client-keys/<int:key_id>/", client_keys.key_edit, name="client-key"),
    path("client-keys/<int:key_id>/revoke/", client_keys.key_revoke, name="client-key-revoke"),
    path("fleet/limits/", client_keys.limits, name="limits"),
    path("audit/", audit.audit, name="audit"),
    path("audit.csv", audit.audit_csv, name="audit-csv"),
    path("routers/", routers.router_list, name="routers"),
    path("configurations/", revisions.configuration_list, name="configurations"),
    path("configurations/compare/", revisions.configuration_compare, name="configuration-compare"),
    path("configurations/<int:number>/", revisions.configuration_detail, name="configuration"),
    path("routers/<int:router_id>/", routers.router_detail, name="router"),
    path("routers/<int:router_id>/remove/", routers.router_remove, name="router-remove"),
    path("task-groups/", fleet.group_list, name="task-groups"),
    path("task-groups/new/<int:pool_id>/", fleet.group_new, name="task-group-new"),
    path("task-groups/<int:group_id>/", fleet.group_edit, name="task-group"),
    path("task-groups/<int:group_id>/remove/", fleet.group_remove, name="task-group-remove"),
    path("task-groups/<int:group_id>/purge/", fleet.group_purge, name="task-group-purge"),
]

account_urlpatterns = [
    path("login/", account.login, name="account_login"),
    path("login/code/", second_factor.authenticate, name="mfa_authenticate"),
    path("logout/", account.logout, name="account_logout"),
    path("inactive/", account.account_inactive, name="account_inactive"),
    path("password/change/", account.password_change, name="account_change_password"),
    path("password/set/", single_sign_on.no_password, name="account_set_password"),
    path("confirm/", account.reauthenticate, name="account_reauthenticate"),
    path("confirm/code/", second_factor.reauthenticate, name="mfa_reauthenticate"),
    path("second-factor/", second_factor.index, name="mfa_index"),
    path("second-factor/set-up/", totp.activate_totp, name="mfa_activate_totp"),
    path("second-factor/remove/", totp.deactivate_totp, name="mfa_deactivate_totp"),
    path("second-factor/recovery-codes/", recovery_codes.view_recovery_codes, name="mfa_view_recovery_codes"),
    path(
        "second-factor/recovery-codes/new/", recovery_codes.generate_recovery_codes, name="mfa_generate_recovery_codes"
    ),
    path("oidc/<str:provider_id>/", single_sign_on.start, name="openid_connect_login"),
    path("oidc/<str:provider_id>/callback/", single_sign_on.callback, name="openid_connect_callback"),
    path("single-sign-on/cancelled/", single_sign_on.cancelled, name="socialaccount_login_cancelled"),
    path("single-sign-on/disconnect/", single_sign_on.disconnect, name="single_sign_on_disconnect"),
]
