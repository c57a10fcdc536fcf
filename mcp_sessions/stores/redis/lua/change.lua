-- needs: session log
-- ARGV: a field of the record, and its new value; none: it is removed. 'log': the value is the
-- events' new epoch. 'lists': a token and the URIs that are subscribed from now on follow.
-- Nothing if the session is not there. 1: the field has another value now; 0: it had this one. Of
-- 'lists': the subscriptions that there were, and their tokens.
local field, value = ARGV[1], ARGV[2]
local mode, ends = unpack(redis.call('HMGET', base, 'mode', 'ends'))
if not ends then
    return false
end
if field == 'log' then
    if mode == 'protocol' then
        local log = new_log('events', value)
        redis.call('UNLINK', log.events, log.by_key)
        save(log)
    end
    return 1
end
if field == 'lists' then
    local uris = base .. ':u'
    local before = redis.call('HGETALL', uris)
    redis.call('UNLINK', uris)
    for i = 4, #ARGV do
        redis.call('HSET', uris, ARGV[i], ARGV[3])
    end
    share_lifetime(uris)
    redis.call('HDEL', base, 'ub')
    redis.call('HSET', base, 'lists', value, 'uris', ARGV[3])
    return { ends == 'inf' and 'for ever' or 'subscribed', before }
end
if not value then
    return redis.call('HDEL', base, field)
end
local before = redis.call('HGET', base, field)
redis.call('HSET', base, field, value)
return before ~= value and 1 or 0
